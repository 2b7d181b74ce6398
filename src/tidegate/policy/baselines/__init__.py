"""The policies of other routers, one module each, with their authors' constants."""
