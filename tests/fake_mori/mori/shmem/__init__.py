from .api import *  # noqa: F403
