from pathlib import Path


def test_it_is_there():
    assert Path("/app/hello.txt").is_file()


def test_it_says_hello():
    assert Path("/app/hello.txt").read_text() == "Hello, world!\n"
