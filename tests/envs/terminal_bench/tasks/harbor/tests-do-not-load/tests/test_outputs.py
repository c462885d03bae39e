import no_such_distribution


def test_anything():
    assert open("/app/anything.txt").read()
