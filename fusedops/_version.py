"""The version, which meson.build has too."""

__version__ = "0.2.0"
