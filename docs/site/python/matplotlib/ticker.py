class MaxNLocator:
    def __init__(self, integer=False):
        self.integer = integer
