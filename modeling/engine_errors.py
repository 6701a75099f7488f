"""What a bad item can make modelling code raise. Anything else is a fault of ours."""

ENGINE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
