"""The languages of rows: how to recognise their tests, which programs they need, and how tests are installed and run if
the row does not say it.

One entry of `LANGUAGES` is all that a language needs. Commands are shell text that runs in a slot only. `install` runs
once per commit with a network; `test` runs without one, with the test files as its arguments.

The prepared tree decides which programs `test` runs (`PREPARED_TREE`), because a benchmark fixes a row's command: a new
Gemfile of the work, for example, does not make it run bundler.

Not covered: reading single test functions. Only Python has that (`falsified.py`); the tests of other languages are
protected, removed and restored by file.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from palaestra_suites.toolchain.toolchain import DEFAULT_PATH

CACHE = "/opt/palaestra/cache"
"""Where package managers keep what they download, in the prepared slot and its forks."""

PREPARED_TREE = "/opt/palaestra/tree"
"""The beginning of each file at the top of the prepared repository, and an empty directory for each one there."""

NOTE_TREE = f"""mkdir -p {PREPARED_TREE}
for each in * .[!.]*; do
    if [ -d "$each" ]; then mkdir -p "{PREPARED_TREE}/$each"
    elif [ -f "$each" ]; then head -c 100000 "./$each" > "{PREPARED_TREE}/$each"
    fi
done"""
"""Makes `PREPARED_TREE`. Runs in the prepared repository."""


@dataclass(frozen=True, slots=True)
class Language:
    """One language. `suffixes` are the endings of its sources, and `tests` matches the names of test files.

    `programs` must be in the slot, and `packages` are the Debian packages that have them. `products` are directories
    and `product_suffixes` endings of files that an installation, a build or a cache makes: they are in no patch.
    `settings` matches the names of files that a build, a package manager or a test runner loads, and `setting_folders`
    are such directories at the top of the repository. `build` builds the untouched repository once, so that sessions
    build only what changed; it may fail. `places` are directories of programs besides the system's. `parser` names
    a parser of `grading/log_parsers.py`.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    tests: str
    programs: tuple[str, ...]
    packages: str
    parser: str
    install: str
    test: str
    tests_share_package: bool = False
    """Whether test files in one directory are built together, so that a new one can replace what runs the others."""
    lists_sources: bool = False
    """Whether build files name each source that is linked."""
    settings: str = ""
    setting_folders: frozenset[str] = frozenset()
    build: str = ""
    places: str = ""
    products: frozenset[str] = frozenset()
    product_suffixes: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def is_test(self, path: str) -> bool:
        """Return whether a path looks like a test: by the file's name, or by a directory of tests above it."""
        parts = PurePosixPath(path)
        return re.fullmatch(self.tests, parts.name) is not None or bool(TEST_FOLDERS.intersection(parts.parts[:-1]))

    def is_setting(self, path: PurePosixPath) -> bool:
        """Return whether a build, a package manager or a test runner loads this path by itself."""
        named = re.fullmatch(f"(?:{_BUILD_FILES}|{self.settings})", path.name) is not None
        return named or path.parts[0] in self.setting_folders

    def is_source(self, path: str) -> bool:
        """Return whether a path looks like a source that is neither a test nor a setting."""
        return path.endswith(self.suffixes) and not (self.is_test(path) or self.is_setting(PurePosixPath(path)))

    def is_product(self, path: PurePosixPath) -> bool:
        """Return whether an installation or a build makes this path."""
        return not self.products.isdisjoint(path.parts) or path.name.endswith(self.product_suffixes or ("\0",))

    def missing_programs(self) -> list[str]:
        """Return the programs of this language that this machine has in no directory that slots use."""
        path = f"{DEFAULT_PATH}:{self.places}"
        return [name for name in self.programs if shutil.which(name, path=path) is None]

    def elsewhere(self, names: Iterable[str]) -> list[str]:
        """Return where this machine has these programs in directories that slots do not use, such as the home directory
        of a user."""
        home = os.path.expanduser("~")
        places = [place for pattern in _USERS_PLACES for place in glob.glob(f"{home}/{pattern}")]
        path = os.pathsep.join([os.environ.get("PATH", ""), *places])
        return sorted({str(found) for name in names if (found := shutil.which(name, path=path))})


_USERS_PLACES = (".cargo/bin", ".nvm/versions/node/*/bin", ".local/bin", "go/bin", ".rbenv/shims", ".asdf/shims",
                 ".volta/bin", ".sdkman/candidates/*/current/bin")  # fmt: skip
"""Where installers for one user put toolchains, in the home directory."""
_BUILD_FILES = r"(?:GNUm|[mM])akefile(?:\..*)?|.*\.(?:mk|mak)|[jJ]ustfile|Taskfile\.ya?ml"
"""Files of build tools that any language uses."""

_MADE_BESIDE = {
    "CMakeFiles": r"Makefile|build\.ninja|(?:cmake_install|CTestTestfile|CPack\w*)\.cmake",
    "meson-private": r"build\.ninja",
    "config.status": r"Makefile",
    ".deps": r"Makefile",
}
"""What tools that make build files write into a directory, and the build files that they make there."""


def made_by_builds(paths: Iterable[str]) -> frozenset[str]:
    """Return the build files among these paths that a tool has made, for example in a build directory."""
    parts = [PurePosixPath(path) for path in paths]
    beside = {(str(path.parent), path.name) for path in parts if path.name in _MADE_BESIDE}
    return frozenset(
        str(path)
        for path in parts
        for tool, names in _MADE_BESIDE.items()
        if (str(path.parent), tool) in beside and re.fullmatch(names, path.name)
    )


TEST_FOLDERS = frozenset({"test", "tests", "testing", "__tests__", "spec", "specs", "testdata", "__snapshots__", "t"})

_NODE_TEST = f"""
bin=node_modules/.bin
if [ -x $bin/vitest ]; then $bin/vitest run --reporter=verbose "$@"
elif [ -x $bin/jest ]; then $bin/jest --verbose "$@"
elif [ -x $bin/mocha ]; then $bin/mocha --reporter spec "$@"
elif [ -x $bin/ava ]; then $bin/ava --tap "$@"
elif [ -x $bin/tape ]; then $bin/tape "$@"
elif grep -qs '"test".*node --test' {PREPARED_TREE}/package.json; then node --test --test-reporter=tap "$@"
else npm test --silent
fi
"""
_NODE_INSTALL = """
[ -f package.json ] || exit 0
export npm_config_audit=false npm_config_fund=false npm_config_update_notifier=false
if [ -f pnpm-lock.yaml ] && command -v pnpm; then pnpm install --frozen-lockfile
elif [ -f yarn.lock ] && command -v yarn; then yarn install --frozen-lockfile
elif [ -f package-lock.json ] || [ -f npm-shrinkwrap.json ]; then
    npm ci || npm install --legacy-peer-deps
else npm install --legacy-peer-deps
fi
"""
_GO_TEST = """
folders=$(for file in "$@"; do case $file in *.go) dirname "./$file" ;; esac; done | sort -u)
go test -v ${folders:-./...}
"""
_CMAKE_BUILD = (
    "cmake -S . -B build-palaestra -DCMAKE_BUILD_TYPE=Debug -DBUILD_TESTING=ON && cmake --build build-palaestra -j 2"
)
_C_TEST = f"""
if [ -f {PREPARED_TREE}/CMakeLists.txt ]; then {_CMAKE_BUILD} && ctest --test-dir build-palaestra --output-on-failure
elif [ -f {PREPARED_TREE}/meson.build ]; then meson setup build-palaestra && meson test -C build-palaestra
else
    if [ -x configure ] && [ ! -f Makefile ]; then ./configure; fi
    make -j 2 check || make -j 2 test
fi
"""
_MAVEN_TEST = f"""
if [ -f {PREPARED_TREE}/pom.xml ]; then mvn -o -B test
else ./gradlew --offline test --info
fi
"""
_RUBY_TEST = f"""
run=; if [ -f {PREPARED_TREE}/Gemfile ]; then run="bundle exec"; fi
if [ -d spec ] && [ ! -d {PREPARED_TREE}/test ]; then $run rspec --format documentation "$@"
else
    [ $# != 0 ] || set -- $(find test -name 'test_*.rb' -o -name '*_test.rb' | sort)
    for file in "$@"; do case $file in *.rb) $run ruby -Ilib -Itest "$file" -v ;; esac; done
fi
"""

_NODE = Language(
    name="javascript",
    title="JavaScript",
    suffixes=(".js", ".mjs", ".cjs", ".jsx"),
    tests=r".*[._-](?:test|spec|tests|specs)\.[cm]?[jt]sx?(?:\.snap)?|(?:test|tests)\.[cm]?[jt]sx?",
    programs=("node", "npm"),
    packages="nodejs npm",
    parser="node",
    install=_NODE_INSTALL,
    test=_NODE_TEST,
    settings=(
        r"package\.json|[jt]sconfig.*\.json|mocha\.opts|\.pnpmfile\.cjs|(?:gulp|[gG]runt|[jJ]ake)file(?:\..*)?|"
        r"\.(?:mocha|babel|npm|yarn|nyc|c8|swc|tap|jest|jasmine)rc(?:\..*)?|jasmine\.json|"
        r"(?:jest|vitest|vite|ava|babel|karma|rollup|webpack|nyc|playwright|web-test-runner|wdio|tsup|jasmine)"
        r"\.(?:conf|config|workspace)(?:\..*)?|(?:jest|vitest)[.-](?:setup|preset)(?:\..*)?"
    ),
    products=frozenset({"node_modules", ".nyc_output", "coverage", ".vite", ".turbo"}),
    env={"npm_config_cache": f"{CACHE}/npm", "CI": "1", "NO_COLOR": "1", "FORCE_COLOR": "0"},
)  # fmt: skip

_C = Language(
    name="c",
    title="C",
    suffixes=(".c", ".h"),
    tests=r"(?:test|check)[_-].*|.*[_-]tests?\.[ch]|tests?\.[ch]|unittest.*",
    programs=("gcc", "make"),
    packages="build-essential cmake",
    parser="c",
    install="true",
    test=_C_TEST,
    lists_sources=True,
    settings=(
        r"CMakeLists\.txt|.*\.cmake(?:\.in)?|CMake(?:User)?Presets\.json|configure(?:\.ac|\.in)?|.*\.am|autogen\.sh|"
        r"meson\.build|meson(?:_options\.txt|\.options)|(?:BUILD|WORKSPACE|MODULE)(?:\.bazel)?|.*\.bzl|\.bazelrc|"
        r"conanfile\..*|vcpkg\.json|build\.ninja|SConstruct|SConscript|xmake\.lua"
    ),
    build="[ ! -f CMakeLists.txt ] || { " + _CMAKE_BUILD + "; }",
    products=frozenset({"build-palaestra", "CMakeFiles", ".deps", ".libs", "autom4te.cache"}),
    product_suffixes=(".d", ".o", ".lo", ".a", ".la", ".so", ".gcda", ".gcno"),
)

LANGUAGES: Mapping[str, Language] = {
    language.name: language
    for language in (
        _NODE,
        replace(
            _NODE,
            name="typescript",
            title="TypeScript",
            suffixes=(".ts", ".tsx", ".mts", ".cts"),
        ),
        Language(
            name="go",
            title="Go",
            suffixes=(".go",),
            tests=r".*_test\.go",
            programs=("go",),
            packages="golang-go",
            parser="gotest",
            install="[ ! -f go.mod ] || [ -d vendor ] || go mod download",
            test=_GO_TEST,
            tests_share_package=True,
            settings=r"go\.(?:mod|sum|work|work\.sum)",
            setting_folders=frozenset({"vendor"}),
            build="[ ! -f go.mod ] || go test -run '^$' ./...",
            places="/usr/local/go/bin",
            env={
                "GOPATH": f"{CACHE}/go",
                "GOCACHE": f"{CACHE}/go-build",
                "GOTOOLCHAIN": "local",
                "GOFLAGS": "-buildvcs=false",
            },
        ),
        Language(
            name="rust",
            title="Rust",
            suffixes=(".rs",),
            tests=r".*_tests?\.rs|tests?\.rs",
            programs=("cargo", "rustc"),
            packages="cargo rustc",
            parser="cargo",
            install="cargo fetch || { [ -d vendor ] || ! grep -qs 'source = ' Cargo.lock; }",
            test="cargo test --offline --no-fail-fast",
            settings=r"Cargo\.toml|build\.rs|rust-toolchain(?:\.toml)?|nextest\.toml",
            setting_folders=frozenset({".cargo", "vendor"}),
            build="[ ! -f Cargo.toml ] || cargo test --offline --no-run",
            products=frozenset({"target"}),
            env={"CARGO_HOME": f"{CACHE}/cargo", "CARGO_TERM_COLOR": "never"},
        ),
        Language(
            name="java",
            title="Java",
            suffixes=(".java", ".kt"),
            tests=r"(?:Test.*|.*(?:Test|Tests|TestCase|IT))\.(?:java|kt)",
            programs=("java", "javac"),
            packages="default-jdk-headless maven junit4",
            parser="java",
            install="[ ! -f pom.xml ] || mvn -B -q dependency:go-offline",
            test=_MAVEN_TEST,
            settings=(
                r"pom\.xml|.*\.gradle(?:\.kts)?|gradle\.properties|(?:gradlew|mvnw)(?:\.bat|\.cmd)?|build\.xml|ivy\.xml|"
                r"testng\.xml|junit-platform\.properties|gradle-wrapper\..*|libs\.versions\.toml|org\.(?:junit|testng)\..*"
            ),
            setting_folders=frozenset({".mvn", "buildSrc"}),
            products=frozenset({"target", ".gradle"}),
            product_suffixes=(".class",),
            env={"MAVEN_OPTS": f"-Dmaven.repo.local={CACHE}/maven", "GRADLE_USER_HOME": f"{CACHE}/gradle"},
        ),
        _C,
        replace(
            _C,
            name="c++",
            title="C++",
            suffixes=(".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx"),
            tests=r"(?:test|check)[_-].*|.*[_-](?:test|tests|unittest)\.(?:cc|cpp|cxx)|tests?\.(?:cc|cpp|cxx)",
            programs=("g++", "make"),
        ),
        Language(
            name="ruby",
            title="Ruby",
            suffixes=(".rb",),
            tests=r".*_(?:test|spec)\.rb|test_.*\.rb",
            programs=("ruby",),
            packages="ruby ruby-minitest ruby-rspec bundler",
            parser="ruby",
            install="[ ! -f Gemfile ] || bundle install",
            test=_RUBY_TEST,
            settings=(
                r"Gemfile(?:\.lock)?|gems\.(?:rb|locked)|Rakefile|.*\.(?:rake|gemspec)|\.rspec(?:-local)?|\.simplecov|"
                r"(?:spec|test|rails)_helper\.rb|cucumber\.ya?ml"
            ),
            products=frozenset({".bundle"}),
            env={"BUNDLE_PATH": f"{CACHE}/bundle"},
        ),
        Language(
            name="php",
            title="PHP",
            suffixes=(".php",),
            tests=r".*Test\.php",
            programs=("php",),
            packages="php-cli phpunit composer",
            parser="phpunit",
            install="[ ! -f composer.json ] || composer install --no-interaction",
            test='run=vendor/bin/phpunit; [ -x $run ] || run=phpunit; $run --testdox "$@"',
            settings=(
                r"composer\.json|\.?phpunit.*|php\.ini|\.user\.ini|Pest\.php|bootstrap\.php|behat\.ya?ml(?:\.dist)?|"
                r"phpspec\.ya?ml"
            ),
            products=frozenset({"vendor", ".phpunit.cache"}),
            env={"COMPOSER_HOME": f"{CACHE}/composer"},
        ),
    )
}

_OTHER_NAMES = {
    "js": "javascript", "node": "javascript", "nodejs": "javascript", "jsx": "javascript", "ts": "typescript",
    "tsx": "typescript", "golang": "go", "cpp": "c++", "cxx": "c++", "rs": "rust", "kotlin": "java", "py": "python",
    "rb": "ruby",
}  # fmt: skip
_PARSER_LANGUAGES = {
    "javascript": ("jest", "jest_json", "vitest", "karma", "tap", "mocha", "node", "marked", "test_files", "calypso",
                   "eslint", "chart_js", "carbon", "react_pdf", "grommet", "p5js", "prismjs", "lighthouse", "next",
                   "openlayers", "quarto_cli", "bpmn_js", "highlightjs", "immutable_js", "lighthouse_mocha"),
    "go": ("gotest", "gotest_json"),
    "rust": ("cargo",),
    "java": ("maven", "surefire", "gradle_custom", "ant", "java", "junit"),
    "c": ("redis", "jq", "micropython_test", "ctest", "c"),
    "c++": ("doctest", "googletest"),
    "ruby": ("minitest", "cucumber", "ruby_unit", "rspec_transformed_json", "jekyll", "rspec", "ruby",
             "minitest_verbose"),
    "php": ("phpunit", "phpunit_lines"),
}  # fmt: skip
PYTHON = "python"


def language_called(name: str) -> str:
    """Return the name of a language here, for the name that a data set uses. It may be one that is not in
    `LANGUAGES`."""
    word = name.strip().lower()
    return _OTHER_NAMES.get(word, word)


def language_of_parser(parser: str) -> str:
    """Return the language whose logs a parser reads (`short_name`), or an empty string."""
    return next((language for language, names in _PARSER_LANGUAGES.items() if parser in names), "")


def language_of_files(paths: Iterable[str]) -> str:
    """Return the language of most of these files, or an empty string. Files that no language has do not count."""
    endings = [PurePosixPath(path).suffix for path in paths]
    known = [name for ending in endings for name in [_language_of(ending)] if name]
    return max(dict.fromkeys(known), key=known.count, default="")


def _language_of(ending: str) -> str:
    if ending in (".py", ".pyx", ".pyi"):
        return PYTHON
    return next((language.name for language in LANGUAGES.values() if ending in language.suffixes), "")


def language_names() -> Collection[str]:
    """Return the languages whose rows run, Python first."""
    return (PYTHON, *LANGUAGES)
