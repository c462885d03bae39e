import pytest

from palaestra_gateway.platform import ChatAddress, Incoming, session_key, with_quote


@pytest.mark.parametrize(
    ("address", "per_user", "key"),
    [
        (ChatAddress("telegram", "42"), True, "agent:main:telegram:dm:42"),
        (ChatAddress("telegram", "42", "dm", "7"), True, "agent:main:telegram:dm:42:7"),
        (ChatAddress("telegram", "-100", "group"), True, "agent:main:telegram:group:-100:anna"),
        (ChatAddress("telegram", "-100", "group", "7"), True, "agent:main:telegram:group:-100:7:anna"),
        (ChatAddress("telegram", "-100", "group", "7"), False, "agent:main:telegram:group:-100:7"),
        (ChatAddress("matrix", "!room:host", "channel"), False, "agent:main:matrix:channel:!room%3Ahost"),
    ],
)
def test_the_key_of_a_session_names_its_place(address, per_user, key):
    assert session_key(Incoming(address, "m1", "anna", "hello"), per_user=per_user) == key


def test_two_places_never_share_a_key():
    places = [
        ChatAddress("p", "a", "group", "b:c"),
        ChatAddress("p", "a:b", "group", "c"),
        ChatAddress("p", "a", "group", "b%3Ac"),
        ChatAddress("p", "a%3Ab", "group", "c"),
    ]
    keys = {session_key(Incoming(place, "m", "u"), per_user=False) for place in places}
    assert len(keys) == len(places)


@pytest.mark.parametrize("said", ["why?", "/new", "yes", "two\nlines", ""])
@pytest.mark.parametrize("quoted", ["The build failed", "two\n\nlines", "> a quote", "", None, "x" * 5000])
def test_what_a_reply_quotes_is_read_and_is_no_part_of_a_command(said: str, quoted: str | None) -> None:
    message = Incoming(ChatAddress("telegram", "5"), "9", "5", with_quote(said, quoted))
    assert message.said == said
    assert all(line in message.text for line in (quoted or "")[:1000].splitlines())
    assert len(message.text) < 3000
