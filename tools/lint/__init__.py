"""What flake8 cannot know: the words of docs/glossary.md, stale names in prose, and how long things may be.

    python -m tools.lint               every fault with file, line and what to write; exit code 1 where there is one
    python -m tools.lint sft/data      only those of files whose path begins so
    python -m tools.lint --report      only how many there are, by folder and kind

words        retired words, in code and docs
references   names, paths and links in prose that lead nowhere
limits       lines of functions, files and docs; parameters, methods, entries at the top of sft/
"""
