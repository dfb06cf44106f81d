#!/usr/bin/env bash
# ci/docs.sh: builds the site into docs/_build/html, with warnings as errors, checks the English of the pages, and the files that other tools
# read: the workflow of the forge, the citation, the recipes in `packaging`, and the package as it would be uploaded.
# shellcheck disable=SC2329  # the functions below are called by name, by `stage`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh
bin=.venv/docs/bin

upload() {
  local work
  work=$(mktemp -d)
  # shellcheck disable=SC2064  # now, not then
  trap "rm -rf '$work'" RETURN
  "$bin/python" -m build -q --outdir "$work" . > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
  "$bin/twine" check --strict "$work"/*.whl "$work"/*.tar.gz
}

stage "env docs" bash ci/env.sh mpich .venv/docs docs
[[ $failed -eq 0 ]] || summary
stage "site" "$bin/sphinx-build" -q -E -W --keep-going -b html docs docs/_build/html
stage "words" "$bin/python" docs/check_words.py
stage "workflow" "$bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/ci.yml
stage "citation" "$bin/check-jsonschema" --builtin-schema vendor.citation-file-format CITATION.cff
stage "packaging" "$bin/python" ci/check_packaging.py
stage "upload" upload
summary
