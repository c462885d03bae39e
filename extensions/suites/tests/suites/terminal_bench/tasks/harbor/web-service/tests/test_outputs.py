import urllib.request


def test_it_answers():
    with urllib.request.urlopen("http://127.0.0.1:8765/page.txt", timeout=10) as reply:
        assert reply.read() == b"page\n"
