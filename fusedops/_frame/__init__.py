"""The code that all ops share: choice of backends, calls and their derivatives."""
