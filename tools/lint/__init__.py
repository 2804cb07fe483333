"""Checks what flake8 does not check: words of docs/glossary.md, stale names in prose, and limits of length.

    python -m tools.lint             print every fault with file, line and advice; exit code 1 if there is one
    python -m tools.lint sft/data    print only faults of files whose path begins with sft/data

words       retired words; in sft/, docstrings that do not name the thing, and names that two classes have
references  names, paths and links in prose whose targets do not exist; pages that mkdocs.yml does not list
limits      lines of functions and of files of sft/; columns of pages; parameters; methods; entries at the top of sft/
"""
