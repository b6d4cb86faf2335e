"""The OpenAI-compatible server: what a request may ask for, the engines behind it, and how answers are told.

Only `app` and `server` know FastAPI and uvicorn, and import them when a server is made: everything here can be imported
without them.
"""
