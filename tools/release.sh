#!/usr/bin/env bash
# Builds the release of the version in sft/__init__.py, tries its wheel in an environment of its own outside of the
# repository, and prints the commands that publish it.  It publishes nothing.  `make release` runs it.
#
#     tools/release.sh [PYTHON]        PYTHON builds and tries the wheel (default: python3)
#
# It needs the package index, and leaves the wheel and the sdist in dist/VERSION/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

fail() {
    echo "error: $*" >&2
    exit 2
}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' sft/__init__.py)
dist=$PWD/dist/$version
test -n "$version" || fail "sft/__init__.py has no line __version__ = \"...\""
test -z "$(git status --porcelain)" || fail "the tree has changes. Commit or remove what git status lists"
grep -q "^version: $version$" CITATION.cff || fail "CITATION.cff names another version than $version"
grep -q "^## $version (20[0-9-]*)$" CHANGELOG.md || fail "CHANGELOG.md has no heading '## $version (DATE)'"
test "$(git rev-parse --quiet --verify "v$version^{commit}")" = "$(git rev-parse HEAD)" ||
    fail "the tag v$version is missing, or names another commit. Run: git tag --annotate v$version --message 'sft $version'"
test ! -e "$dist" || fail "$dist exists. Remove it to build again"

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
echo "== building the sdist, and the wheel from the sdist, into $dist"
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --disable-pip-version-check build
"$work/build/bin/python" -m build --outdir "$work/dist" . >"$work/build.log" || fail "the build failed: $(tail -n 20 "$work/build.log")"

echo "== looking for the recipes in the wheel"
git ls-files 'recipes/*.yaml' | sed 's|^|share/sft/|' | sort >"$work/expected"
"$python" -m zipfile --list "$work"/dist/*.whl | sed -n 's|^[^ ]*\.data/data/\(share/sft/recipes/[^ ]*\).*|\1|p' | sort >"$work/found"
diff "$work/expected" "$work/found" || fail "the wheel has other recipes than git ls-files"

echo "== installing the wheel into an environment of its own (gigabytes where torch comes with CUDA)"
"$python" -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$work"/dist/*.whl

echo "== trying it outside of the repository"
mkdir "$work/user"
(
    cd "$work/user"
    unset PYTHONPATH
    PATH="$work/env/bin:$PATH"
    sft --version | tee version
    grep -q "^sft $version," version || fail "the installed sft is not $version"
    sft init demo --out demo.yaml
    sft check demo.yaml --world-size 2 --no-data
)

mkdir --parents dist
mv "$work/dist" "$dist"
cat <<END

All passed; nothing is published. To publish sft $version:

  git push origin v$version
  $python -m pip install twine
  $python -m twine check $dist/*
  $python -m twine upload $dist/*

Then make a release of the tag v$version, with the part '## $version' of CHANGELOG.md as its text.
END
