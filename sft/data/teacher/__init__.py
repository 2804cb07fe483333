"""Reads a teacher's distributions for supervised tokens: from rows, and from the files of `sft score`."""
