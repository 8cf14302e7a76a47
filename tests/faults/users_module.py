def outer(rank):
    def inner(divisor):
        return 1 / divisor

    return inner(1 - rank)
