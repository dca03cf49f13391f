"""What caching costs in answers, and what it saves in time: measured, never assumed."""
