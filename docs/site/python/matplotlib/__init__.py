"""As much of Matplotlib as the pictures under sliders use, drawn as SVG: the real one is not there in a browser.

The course's own `draw` functions run unchanged on it. What it does not know raises AttributeError or TypeError, so a
picture that needs more fails in tests/pages/test_site_sliders.py and not before a reader.
"""
