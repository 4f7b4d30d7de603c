"""Does a split program compute what one process computes, tensor by tensor?"""
