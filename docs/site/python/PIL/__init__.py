"""Nothing is quantised in a browser: pictures there are SVG."""

Image = None
