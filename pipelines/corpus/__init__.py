"""Corpora: files of several forms, local or in a bucket, as a stream of documents."""

from pipelines.corpus.columns import Columns, CorpusRow
from pipelines.corpus.files import CorpusFile, corpus_files
from pipelines.corpus.formats import read_rows

__all__ = ["Columns", "CorpusFile", "CorpusRow", "corpus_files", "read_rows"]
