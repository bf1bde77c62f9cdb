def to_rgb(colour):
    """Three numbers from 0 to 1 of "#rrggbb"."""
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


class ListedColormap:
    pass
