"""``hypic-rag bench serve``: the server's speed. Above both the server and the evaluation."""
