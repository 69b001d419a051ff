"""The daemon's web page: one small static bundle, read from the package and served as it is.

The files hold no data; ``page.js`` asks the daemon's own JSON routes. No build step, nothing from elsewhere.
"""
