# Two commands: `make book` and `make test`. Each sets itself up; Python 3.11 to 3.14 and make
# are all they need. A third, `make gpu-check`, needs an NVIDIA GPU: it tests the kernels, times them
# and writes a dated record into data/benchmarks/. A fourth, `make print`, writes the main line of the
# book as PDF and EPUB, and needs Debian's chromium, pandoc and poppler-utils, or the like.
#
# On Linux the default torch wheel brings several GB of CUDA libraries. On a machine without a GPU
# point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at PyTorch's CPU wheels (its install page says
# where): pip then takes 2.13.0+cpu, which satisfies the same pin.

# Set on some machines; without compiled modules every import takes twice as long.
export PYTHONDONTWRITEBYTECODE :=

PYTHON  ?= python3
PROFILE ?= recorded
PORT    ?= 8000

BIN   := .venv/bin
PY    := $(BIN)/python
VENV  := .venv/.stamp
BOOK  := book/_build/html
# The longest first, so that none is left alone at the end.
LONGEST := from_drift_to_spike is_my_model_affected the_gradient_error
SOURCES := $(wildcard $(LONGEST:%=notebooks/%.ipynb) notebooks/laboratory/[!_]*.ipynb \
             notebooks/[!_]*.ipynb)
NAMES   := $(SOURCES:notebooks/%.ipynb=%)

DATA  := $(shell find data -type f -not -path '*/.*')
# What the generated pages and the looks of all others depend on.
BUILDER := $(wildcard book/*.yml book/*.bib book/_static/* book/_templates/*) \
           $(addprefix lowprec/,publish/addresses.py publish/book.py publish/facts.py publish/form.py \
             publish/pages.py publish/statements.py publish/terms.py evidence/claims.py evidence/verdicts.py)
# What else the book is written from. _generated and status.md are made from it.
PAGES := $(filter-out book/status.md,$(wildcard book/*.md)) README.md data/README.md \
         $(wildcard $(SOURCES:.ipynb=.claims.yml) $(SOURCES:.ipynb=.lock.json))

# Side by side unless you say otherwise with -j: a page needs a core and up to 2.5 GB. Not with
# `clean`, beside which nothing can be made.
MEMORY := /proc/meminfo
CORES  := $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
ROOM   := $(if $(wildcard $(MEMORY)),$(shell awk '/^MemAvailable/ {print int($$2 / 2.5e6)}' $(MEMORY)))
JOBS   := $(patsubst 0,1,$(firstword $(shell printf '%s\n' $(CORES) $(ROOM) | sort -n)))
ifeq ($(filter -j% --jobserver%,$(MAKEFLAGS))$(filter clean,$(MAKECMDGOALS)),)
MAKEFLAGS += -j$(JOBS)
endif

.PHONY: venv book print test gpu-check notebooks serve check-book check-links strip clean FORCE
.DELETE_ON_ERROR:

book: book/_build/.stamp

venv: $(VENV)

test: $(VENV)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal

# One process: tests that share the GPU would also share its memory.
gpu-check: $(VENV)
	LOWPREC_GPU_TESTS=1 $(PY) -m pytest -m gpu -p no:xdist --junitxml=build/gpu-tests.xml
	$(PY) -m lowprec.studies.benchmark data/benchmarks --tests build/gpu-tests.xml \
	  $(if $(RELEASED),--released $(RELEASED))
	$(PY) -m lowprec verify --write

# One rule a profile: `recorded` is what the book shows, the others go to build/. A page leaves
# beside itself, in .NAME.d, what it has read; one that has not yet is executed.
folder = $(if $(filter recorded,$(1)),book/executed,build/$(1))
define execute
$(call folder,$(1))/%.ipynb: notebooks/%.ipynb notebooks/profiles/$(1).yaml $(VENV)
	$(PY) -m lowprec notebook $$< $$@ --profile $(1) --depfile $$(@D)/.$$(*F).d
endef
$(foreach profile,recorded gpu,$(eval $(call execute,$(profile))))

ifneq ($(filter-out recorded gpu,$(PROFILE)),)
$(error PROFILE is '$(PROFILE)': take recorded or gpu)
endif
notebooks: $(NAMES:%=$(call folder,$(PROFILE))/%.ipynb)

EXECUTED := $(NAMES:%=book/executed/%.ipynb) $(NAMES:%=build/gpu/%.ipynb)
DEPFILES := $(wildcard $(join $(dir $(EXECUTED)),$(patsubst %.ipynb,.%.d,$(notdir $(EXECUTED)))))
-include $(DEPFILES)
READ := $(join $(dir $(DEPFILES)),$(patsubst .%.d,%.ipynb,$(notdir $(DEPFILES))))
$(filter-out $(READ),$(EXECUTED)): FORCE
FORCE:

# Data that changed is held against its manifest before a page reads it. Order-only: that alone
# makes no page old.
RECORDED := $(NAMES:%=book/executed/%.ipynb)
$(RECORDED): | build/.verified
build/.verified: $(DATA) $(VENV)
	$(PY) -m lowprec verify
	@mkdir -p $(@D) && touch $@

book/_build/.stamp: $(RECORDED) $(PAGES) $(BUILDER) $(VENV)
	rm -f $(filter-out $(RECORDED),$(wildcard $(addprefix book/executed/,*.ipynb laboratory/*.ipynb)))
	$(if $(filter $(BUILDER) $(VENV),$?),rm -rf book/_build)
	$(PY) -m lowprec claims --write
	$(BIN)/jupyter-book build book -W --keep-going -n -q || \
	  { rm -rf book/_build; exit 1; }  # a page that was read would not warn a second time
	@touch $@
	@echo "The book: $(BOOK)/index.html (make serve shows it)"

print: book
	$(PY) -m lowprec.publish.printed

serve: book
	$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory $(BOOK)

# Of the files that have such tests alone: to read the others takes longer than a page.
check-book: book
	$(PY) -m pytest -n auto --dist worksteal -m book $(shell grep -l 'mark\.book' tests/test_*.py)

# Not beside the pages: the list of links would be published with them.
check-links: book
	$(BIN)/jupyter-book build book --path-output build/links --all --builder linkcheck -q

strip: $(VENV)
	$(BIN)/nbstripout --keep-id $(wildcard notebooks/*.ipynb notebooks/laboratory/*.ipynb)

# Not .venv: it is the slow part, and it renews itself when the pins change.
clean:
	rm -rf build book/_build book/_generated book/executed book/status.md

# --no-compile halves the time: Python compiles what is imported, when it is imported.
$(VENV): constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || \
	  { echo "$(PYTHON) is not there: install Python 3.11 to 3.14, or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 15) or sys.exit("lowprec needs Python 3.11 to 3.14 and %s is %d.%d: name one with PYTHON=..." % ("$(PYTHON)", v[0], v[1]))'
	@echo "Setting up .venv (a few minutes when nothing is cached)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q --no-compile --disable-pip-version-check \
	  -c constraints.txt -e '.[book,data,test]'
	@touch $@
