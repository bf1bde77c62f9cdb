def display(*_objects, **_fields):
    pass
