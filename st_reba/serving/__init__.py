"""A saved model behind HTTP: what ``st-reba serve`` runs, and what ``st-reba verify`` looks at any server with."""
