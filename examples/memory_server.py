"""An agent's memory on one server and one model: it remembers what is said, finds it again, and answers with it.

st-reba build --recipe echo-topic --out my-model
st-reba serve my-model --chat          # leave it running
python examples/memory_server.py       # one line per turn; an empty line quits
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from openai import OpenAI


class Memory:
    """Texts and their vectors, which a server's model makes."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self.client, self.model = client, model
        self.texts: list[str] = []
        self.vectors: list[np.ndarray] = []

    def embed(self, text: str) -> np.ndarray:
        """Return the vector of a text, of length 1."""
        vector = np.array(self.client.embeddings.create(model=self.model, input=text).data[0].embedding)
        return vector / np.linalg.norm(vector)

    def recall(self, vector: np.ndarray, count: int) -> list[str]:
        """Return the texts that are nearest to a vector, in the order in which they were said."""
        similarities = np.array([own @ vector for own in self.vectors])
        return [self.texts[index] for index in sorted((-similarities).argsort()[:count])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="my-model", help="name of the server's model")
    parser.add_argument("--recalled", type=int, default=3, help="number of texts to recall")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key="none")
    memory = Memory(client, options.model)
    for line in map(str.strip, sys.stdin):
        if not line:
            break
        vector = memory.embed(line)
        recalled = memory.recall(vector, options.recalled)
        print("(recalls: " + " / ".join(recalled) + ")")
        system = "You talk with a friend, who said before: " + " ".join(recalled)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": line}]
        for part in client.chat.completions.create(
            model=options.model, messages=messages, temperature=0, max_tokens=60, stream=True
        ):
            print(part.choices[0].delta.content or "", end="", flush=True)
        print()
        memory.texts.append(line)
        memory.vectors.append(vector)


if __name__ == "__main__":
    main()
