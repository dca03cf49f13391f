"""A knowledge base over HTTP: OpenAI's chat protocol, documents, metrics, and a chat page.

Needs the extra ``server``. Imported only by those who serve.
"""
