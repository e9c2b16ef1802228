"""The text of a document inside its user turn, and the hash that tells whether it changed.

Fixed here, once: a document reads ``title``, blank line, ``text``; a document cut into parts repeats its title on
every part; the tokens of the turn around it count as the document's own (they are compressed with it).
"""

import hashlib

SYSTEM = "Answer the question using only the documents above. Reply with the short answer only."
"""System message that training, evaluation and demo share: quality is only comparable under the same one."""


def document_content(title: str, text: str) -> str:
    """What stands in the user turn of a document or part."""
    title, text = title.strip(), text.strip()
    return f"{title}\n\n{text}" if title else text


def content_hash(title: str, text: str) -> str:
    """SHA-256 hex of title and text as given, before any trimming."""
    return hashlib.sha256(f"{title}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()
