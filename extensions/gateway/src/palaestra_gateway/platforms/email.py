"""E-mail, with aioimaplib and aiosmtplib: unread messages of a mailbox are fetched by IMAP and answered by SMTP.

Each e-mail thread is a session. A message is marked as read (`\\Seen`) once it is on the gateway's disk, so a message
that is still unread is fetched after a restart. Automatic messages, mailing lists and the mailbox's own messages are
skipped.

Settings: `token` is the password. `extra` has `address` (the bot's address), `imap_host` and `smtp_host`, and may have
`user` (by default the address), `imap_port` (993), `smtp_port` (465), `security` (tls, none, or starttls, which
concerns only SMTP), `poll_s` (15) and `authserv_id`.

The sender of an e-mail can be forged. With `authserv_id`, the name under which your mail server writes
`Authentication-Results` (RFC 8601), only messages whose sender that server has verified (`dmarc=pass`) are accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from email import message_from_bytes, policy
from email.errors import InvalidHeaderDefect
from email.message import EmailMessage, Message, MIMEPart
from email.utils import formatdate
from functools import partial
from typing import cast

import aioimaplib
import aiosmtplib

from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import (
    Answers,
    Attachment,
    ChatAddress,
    Deliver,
    Incoming,
    PlatformLimits,
    PlatformNotes,
    without_quote,
)
from palaestra_slots.core.charsets import decoded
from palaestra_slots.core.errors import ConfigError, PlatformError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.io.threads import in_own_thread

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_MOST_BYTES = 40 << 20
_SUBJECTS, _SUBJECT_CHARS, _SUBJECTS_NOTE = 1000, 500, "subjects"
_QUOTE_HEAD = re.compile(r"^(On\b.*\bwrote:|Am\b.*\bschrieb\b.*:|-{2,}\s*Original Message\s*-{2,})\s*$")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\((?:[^()\\]|\\.)*\)')
_PRE = re.compile(r"</?pre\b[^<>]*>", re.IGNORECASE)
_LINK = re.compile(r"<a\s[^<>]*>|</a\s*>", re.IGNORECASE)
_HREF = re.compile(r"""\shref=["']?((?:https?|mailto):[^\s"'<>]+)""", re.IGNORECASE)
_CELL = re.compile(r"</t[dh]\s*>\s*(?=<t[dh]\b)", re.IGNORECASE)
_UNSEEN = re.compile(r"<(script|style|head)\b.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_QUOTE_START = re.compile(
    r"""<(?:div|blockquote)\b[^<>]*(?:gmail_quote|type=["']?cite|yahoo_quoted|divRplyFwdMsg)""", re.IGNORECASE
)
"""The beginning of the quoted message, as Gmail, Apple Mail, Yahoo and Outlook mark it."""
_FORWARDED = re.compile(r"-{5,}\s*Forwarded message")
_BLOCK = re.compile(r"</?(?:p|div|br|li|ul|ol|tr|h[1-6]|table|blockquote|pre)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]+>")
_LONGEST_HEAD = 1000
"""The maximum length, in characters, of a line that introduces a quoted message."""
_READ_S = 20.0
"""The time limit, in seconds, for reading one e-mail."""
_MOST_PART_HEADERS = 100
_OF_PROGRAMS = ("List-Id", "List-Unsubscribe", "X-Autoreply", "X-Autorespond")
"""Headers that only programs write."""
_PROGRAMS = frozenset({"mailerdaemon", "noreply", "donotreply", "bounce", "bounces"})
"""The names of mailboxes, without hyphens, that no person reads."""
_PART_HEADER = re.compile(rb"^content-(?:type|disposition)\b", re.MULTILINE | re.IGNORECASE)


class _Policy(policy.EmailPolicy):
    """Refuses headers for which the parser would take very long, because anybody can send an e-mail. A header cut off
    could name another sender."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        name, value = super().header_source_parse(sourcelines)
        most = 3000 if name.lower().startswith(("from", "content-", "message-id")) else 50_000
        if len(value) > most:
            raise ValueError(f"its header {name[:100]} is longer than {most} characters")
        return name, value


class Email:
    """One mailbox."""

    extra_settings = (
        "address",
        "imap_host",
        "smtp_host",
        "user",
        "imap_port",
        "smtp_port",
        "security",
        "poll_s",
        "authserv_id",
    )
    limits = PlatformLimits(max_text=100_000, max_file_bytes=20 << 20)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        extra = config.extra
        self._password = config.secret(name)
        missing = [key for key in ("address", "imap_host", "smtp_host") if not isinstance(extra.get(key), str)]
        if missing or not self._password:
            needed = ", ".join([*(f"extra.{key}" for key in missing), *([] if self._password else ["token"])])
            raise ConfigError(f"platforms.{name} needs {needed}")
        self._address = str(extra["address"])
        self._user = str(extra.get("user", self._address))
        self._security = str(extra.get("security", "tls"))
        if self._security not in ("tls", "starttls", "none"):
            raise ConfigError(f"platforms.{name}.extra.security must be tls, starttls or none, not {self._security!r}")
        self._imap = (str(extra["imap_host"]), _port_number(name, extra.get("imap_port", 993)))
        self._smtp = (str(extra["smtp_host"]), _port_number(name, extra.get("smtp_port", 465)))
        self._poll_s = float(extra.get("poll_s", 15))
        self._authserv_id = str(extra.get("authserv_id", ""))
        self.notes: PlatformNotes | None = None
        self._subjects: OrderedDict[str, str] = OrderedDict()
        self._reading: asyncio.Task[None] | None = None

    async def start(self, deliver: Deliver) -> None:
        await self.stop()
        async with self._sender():
            pass  # no error: the password is right
        if self.notes is not None:
            self._subjects.update(json.loads((await self.notes.read()).get(_SUBJECTS_NOTE, "{}")))
        client = await self._mailbox()
        self._reading = asyncio.create_task(self._read_mailbox(client, deliver), name=f"read {self.name}")
        await asyncio.sleep(0)  # a task that is cancelled before it began would not close the connection

    async def stop(self) -> None:
        reading, self._reading = self._reading, None
        while reading is not None and not reading.done():  # aioimaplib turns some cancellations into errors of its own
            reading.cancel()
            await asyncio.wait([reading], timeout=1.0)

    # Incoming messages

    async def _read_mailbox(self, client: aioimaplib.IMAP4, deliver: Deliver) -> None:
        """Deliver unread messages until the task is cancelled. Reopen a lost connection."""
        wait_s, open_client = 1.0, client
        try:
            while True:
                try:
                    if open_client is None:
                        open_client = await self._mailbox()
                    await self._take_unseen(open_client, deliver)
                    wait_s = 1.0
                    await asyncio.sleep(self._poll_s)
                except (PlatformError, aioimaplib.AioImapException, OSError, TimeoutError) as error:
                    logger.warning("%s: %r; trying again in %.0f s", self.name, error, wait_s)
                    await _closed(open_client)
                    open_client = None
                    await asyncio.sleep(wait_s)
                    wait_s = min(60.0, wait_s * 2)
        finally:
            await _closed(open_client)

    async def _mailbox(self) -> aioimaplib.IMAP4:
        """Return a connection with the inbox selected."""
        kind = aioimaplib.IMAP4 if self._security == "none" else aioimaplib.IMAP4_SSL
        host, port = self._imap
        client = kind(host=host, port=port, timeout=_TIMEOUT_S)
        try:
            await client.wait_hello_from_server()
            login = await client.login(self._user, self._password)
            if login.result != "OK":
                raise PlatformRefused(f"{self.name}: {host} refuses the login of {self._user}: {_response_text(login)}")
            selected = await client.select("INBOX")
            if selected.result != "OK":
                raise PlatformUnavailable(f"{self.name}: {host} has no INBOX: {_response_text(selected)}")
        except PlatformError:
            await _closed(client)
            raise
        except (aioimaplib.AioImapException, OSError, TimeoutError) as error:
            raise PlatformUnavailable(f"{self.name}: {host}:{port} does not answer: {error!r}") from error
        return client

    async def _take_unseen(self, client: aioimaplib.IMAP4, deliver: Deliver) -> None:
        await client.noop()
        found = await client.uid_search("UNSEEN")
        if found.result != "OK":
            raise PlatformUnavailable(f"{self.name}: the search failed: {_response_text(found)}")
        for uid in found.lines[0].split() if found.lines else []:
            number = uid.decode()
            fetched = await client.uid("fetch", number, "(BODY.PEEK[])")
            content = next((bytes(line) for line in fetched.lines if isinstance(line, bytearray)), None)
            if content is None:
                continue  # deleted in the meantime
            try:
                async with asyncio.timeout(_READ_S):
                    message = await in_own_thread(partial(self._parse_mail, content, number))
            except Exception:  # an e-mail that breaks the parser must not block other e-mails, nor the gateway
                logger.exception("%s: the e-mail with the uid %s cannot be read and is skipped", self.name, number)
                message = None
            if message is not None:
                if self.notes is not None:  # before the message, whose answer may come after a restart
                    await self.notes.write(_SUBJECTS_NOTE, json.dumps(self._subjects))
                await deliver(message)
            stored = await client.uid("store", number, "+FLAGS", "(\\Seen)")
            if stored.result != "OK":
                raise PlatformUnavailable(
                    f"{self.name}: message {number} cannot be marked as read: {_response_text(stored)}"
                )

    def _parse_mail(self, content: bytes, uid: str) -> Incoming | None:
        """Return the message in an e-mail. Returns None for an e-mail that is automatic, bulk mail or from this
        mailbox, and for a sender that has not been verified although `authserv_id` is set."""
        if len(_PART_HEADER.findall(content)) > _MOST_PART_HEADERS:
            raise ValueError("it has too many parts")
        mail = cast("EmailMessage", message_from_bytes(content, policy=_Policy()))
        name, user_id = _sender(mail)
        if user_id == self._address.lower():
            return None
        if _is_automatic(mail, user_id):
            logger.info("%s: an automatic message from %s is skipped", self.name, user_id)
            return None
        if not user_id:
            heads = "; ".join(map(str, mail.get_all("From") or ["no sender"]))
            logger.warning("%s: a message is skipped, because its sender is unclear (From: %.200s)", self.name, heads)
            return None
        if self._authserv_id and not self._is_checked(mail, user_id):
            logger.warning("%s: a message from %s is skipped, because its sender was not verified", self.name, user_id)
            return None
        message_id = str(mail.get("Message-ID") or f"<uid-{uid}@{self._address}>").strip()
        references = re.findall(r"<[^<>\s]+>", f"{mail.get('References', '')} {mail.get('In-Reply-To', '')}")
        root = references[0] if references else message_id
        subject = str(mail.get("Subject", "")).strip()
        self._subjects[message_id] = subject[:_SUBJECT_CHARS]
        while len(self._subjects) > _SUBJECTS:
            self._subjects.popitem(last=False)
        address = ChatAddress(self.name, user_id, "dm", root)
        if len(content) > _MOST_BYTES:
            return Incoming(address, message_id, user_id, user_name=name, problem="The e-mail is too large.")
        files = tuple(_attachments(mail))
        text = _written_text(mail) or ("" if files else subject)
        # An answer in a thread has the subject of the message that it answers.
        about = "" if references or text == subject else subject
        return Incoming(address, message_id, user_id, text, files, name, subject=about)

    def _is_checked(self, mail: EmailMessage, user_id: str) -> bool:
        """Return whether the first `Authentication-Results`, which the mailbox's server wrote, confirms the sender.

        Senders choose parts of that header, such as the envelope's address. Therefore, quoted text and comments do not
        count, and a second DMARC result makes the header invalid.
        """
        results = mail.get_all("Authentication-Results") or [""]
        host, _, checks = _QUOTED.sub(" ", str(results[0])).partition(";")
        found = [check for check in checks.lower().split(";") if check.split("=")[0].strip() == "dmarc"]
        if host.split()[:1] != [self._authserv_id] or len(found) != 1:
            return False
        if not re.match(r"\s*dmarc\s*=\s*pass\b", found[0]):
            return False
        checked = re.search(r"\sheader\.from\s*=\s*(\S+)", found[0])
        return checked is None or checked[1].rpartition("@")[2] == user_id.rpartition("@")[2]

    # Outgoing messages

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        mail = self._mail(address, key, answers)
        mail.set_content(text)
        return await self._send_mail(mail)

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        mail = self._mail(address, key, answers)
        mail.set_content(file.name)
        main, _, kind = file.media_type.partition("/")
        mail.add_attachment(file.data, maintype=main, subtype=kind or "octet-stream", filename=file.name)
        return await self._send_mail(mail)

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        raise NotImplementedError("an e-mail cannot be edited")

    async def stream_text(self, message: Incoming, text: str) -> None:
        raise NotImplementedError("this platform cannot stream answers")

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        raise NotImplementedError("e-mail has no typing notices")

    def _mail(self, address: ChatAddress, key: str, answers: Answers | None) -> EmailMessage:
        mail = EmailMessage(policy=policy.SMTP)
        domain = self._address.rpartition("@")[2]
        mail["From"], mail["To"] = self._address, address.chat_id
        mail["Message-ID"], mail["Date"] = f"<{key}@{domain}>", formatdate(localtime=False)
        mail["Auto-Submitted"] = "auto-replied"
        replied = answers.message_id if answers is not None else address.thread_id
        subject = self._subjects.get(replied, "")
        if replied:
            mail["In-Reply-To"] = replied
            mail["References"] = " ".join(dict.fromkeys([address.thread_id or replied, replied]))
        plain = " ".join((subject or "your message").split())
        mail["Subject"] = plain if plain.lower().startswith("re:") else f"Re: {plain}"
        return mail

    async def _send_mail(self, mail: EmailMessage) -> str:
        async with self._sender() as smtp:
            try:
                await smtp.send_message(mail)
            except aiosmtplib.SMTPRecipientsRefused as error:
                codes = [each.code for each in error.recipients]
                raise self._smtp_error(max(codes, default=550), str(error)) from None
            except aiosmtplib.SMTPResponseException as error:
                raise self._smtp_error(error.code, error.message) from None
        return str(mail["Message-ID"])

    def _smtp_error(self, code: int, said: str) -> PlatformError:
        problem = f"{self.name}: {self._smtp[0]} answers {code}: {said}"
        return PlatformRefused(problem) if 500 <= code < 600 else PlatformUnavailable(problem)

    @contextlib.asynccontextmanager
    async def _sender(self) -> AsyncIterator[aiosmtplib.SMTP]:
        """Yield a connection to the SMTP server, logged in if the server offers logins."""
        host, port = self._smtp
        smtp = aiosmtplib.SMTP(
            hostname=host, port=port, timeout=_TIMEOUT_S,
            use_tls=self._security == "tls", start_tls=self._security == "starttls",
        )  # fmt: skip
        try:
            async with smtp:
                await smtp.ehlo()  # without EHLO, the client does not know that the server supports logins
                if smtp.supports_extension("auth"):
                    try:
                        await smtp.login(self._user, self._password or "")
                    except aiosmtplib.SMTPAuthenticationError as error:
                        problem = f"{self.name}: {host} refuses the login of {self._user}: {error.message}"
                        withdrawn = self._reading is not None  # the password was right at the start
                        raise (PlatformUnavailable if withdrawn else PlatformRefused)(problem) from None
                yield smtp
        except (aiosmtplib.SMTPException, OSError, TimeoutError) as error:
            if isinstance(error, PlatformError):
                raise
            raise PlatformUnavailable(f"{self.name}: {host}:{port} does not answer: {error!r:.200}") from error


def _is_automatic(mail: EmailMessage, user_id: str) -> bool:
    """Return whether an e-mail is bulk mail or was sent by a program: a bounce, an autoresponder, a list. An answer
    could be answered by the program, and so on without end. RFC 3834, section 2, and the headers and addresses that
    programs use which do not follow it."""
    if re.split("[;(]", str(mail.get("Auto-Submitted", "no")))[0].strip().lower() != "no":
        return True
    if str(mail.get("Return-Path", "")).strip() == "<>":
        return True
    if str(mail.get("Precedence", "")).strip().lower() in ("bulk", "junk", "list", "auto_reply"):
        return True
    if any(mail.get(header) is not None for header in _OF_PROGRAMS) or _suppresses_answers(mail):
        return True
    return user_id.partition("@")[0].partition("+")[0].replace("-", "").replace("_", "") in _PROGRAMS


def _suppresses_answers(mail: EmailMessage) -> bool:
    """Return whether an Exchange server asks that this e-mail gets no automatic answer."""
    asked = {word.strip().lower() for word in str(mail.get("X-Auto-Response-Suppress", "")).split(",")}
    return not asked.isdisjoint({"all", "oof", "autoreply"})


def _sender(mail: EmailMessage) -> tuple[str, str]:
    """Return the sender's name and address. Both are empty if mail programs could disagree about who the sender is."""
    heads = mail.get_all("From") or []
    addresses = [address for head in heads for address in head.addresses]
    if len(addresses) != 1 or any(isinstance(each, InvalidHeaderDefect) for each in heads[0].defects):
        return "", ""
    return addresses[0].display_name, addresses[0].addr_spec.lower()


_FILE_NAMES = {"message/rfc822": "message.eml"}
"""The names of attachments that have none."""

_SIGNATURES = frozenset({"application/pgp-signature", "application/pkcs7-signature"})


def _attachments(mail: EmailMessage) -> Iterator[Attachment]:
    """Yield the files in a mail, wherever they are: Apple Mail puts them beside the HTML, within one of the two forms
    of the text, and a signature encloses all of it."""
    texts = [id(part) for kind in ("plain", "html") if (part := mail.get_body((kind,))) is not None]
    for part, is_form in _leaves(mail, is_form=False):
        kind, name = part.get_content_type(), part.get_filename()
        text = part.get_content_maintype() == "text"
        # Any other form of the text has no name, and says what the chosen form says.
        if id(part) in texts or kind in _SIGNATURES or (text and not name and (part is mail or is_form)):
            continue
        yield Attachment(name or _FILE_NAMES.get(kind, "file"), kind, _payload(part))


def _leaves(part: MIMEPart, *, is_form: bool) -> Iterator[tuple[MIMEPart, bool]]:
    """Yield the parts that have no parts, each with whether it belongs to one of several forms of the text."""
    if part.get_content_maintype() != "multipart":
        yield part, is_form
        return
    for each in part.iter_parts():
        yield from _leaves(each, is_form=is_form or part.get_content_subtype() == "alternative")


def _written_text(mail: EmailMessage) -> str:
    """Return the text that the sender wrote, without a message quoted at its end."""
    text = _body(mail, "plain")
    if not text.strip():  # some programs send an empty text beside the HTML
        text = _text_of_html(_body(mail, "html"))
    lines = text.replace("\r\n", "\n").rstrip().split("\n")
    own = without_quote(lines)
    if own and len(own) < len(lines) and _QUOTE_HEAD.match(own[-1].strip()[:_LONGEST_HEAD]):
        return "\n".join(own[:-1]).strip()
    return "\n".join(lines).strip()


def _body(mail: EmailMessage, kind: str) -> str:
    part = mail.get_body((kind,))
    if part is None:
        # Without a part that its header promises, the library keeps the text as it is.
        whole = mail.get_payload()
        broken = mail.get_content_maintype() == "multipart" and isinstance(whole, str)
        return str(whole) if broken and kind == "plain" else ""
    if part.get_content_charset("us-ascii") == "us-ascii":  # many programs name no encoding, and send UTF-8
        raw = _payload(part)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw.decode("cp1252", "replace")
    return decoded(_payload(part), part.get_content_charset())


def _text_of_html(page: str) -> str:
    """Return the text of an HTML mail: blocks on lines of their own, entities decoded, quoted messages left out."""
    quote = _QUOTE_START.search(page)
    if quote is not None and not _FORWARDED.search(page, quote.start(), quote.start() + 500):
        page = page[: quote.start()]
    page, lines, at, is_pre = _UNSEEN.sub("", page), list[str](), 0, False
    for tag in [*_PRE.finditer(page), None]:
        piece = page[at : tag.start() if tag else len(page)]
        if is_pre:  # white space counts
            lines += _seen(piece).strip("\n").split("\n")
        else:
            linked = _with_addresses(" ".join(piece.split()))
            text = _seen(_BLOCK.sub("\n", _CELL.sub("\t", linked))).replace("\xa0", " ")
            lines += filter(None, map(str.strip, text.split("\n")))
        if tag:
            at, is_pre = tag.end(), not tag[0].startswith("</")
    return "\n".join(lines)


def _with_addresses(piece: str) -> str:
    """Return the HTML with the address of each link behind it, unless its text is the address."""
    parts, at, address = list[str](), 0, ""
    for tag in _LINK.finditer(piece):
        text = piece[at : tag.start()]
        parts.append(text)
        if address and html.unescape(address) not in _seen(text):
            parts.append(f" ({address})")
        found = _HREF.search(tag[0])
        at, address = tag.end(), found[1] if found else ""
    return "".join([*parts, piece[at:]])


def _seen(piece: str) -> str:
    return html.unescape(_TAG.sub("", piece))


def _payload(part: Message) -> bytes:
    content = part.get_payload(decode=True)
    if isinstance(content, bytes):
        return content
    return b"\n".join(cast("Message", each).as_bytes() for each in part.get_payload())  # an attached e-mail


def _port_number(name: str, value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 16:
        raise ConfigError(f"platforms.{name}: a port must be a number from 1 to 65535, not {value!r}")
    return value


def _response_text(response: aioimaplib.Response) -> str:
    return b" ".join(bytes(line) for line in response.lines)[:200].decode(errors="replace")


async def _closed(client: aioimaplib.IMAP4 | None) -> None:
    """Close a connection, whatever its state."""
    if client is not None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(2):
                await client.logout()
        transport = getattr(client.protocol, "transport", None)
        if transport is not None:
            transport.close()
            await asyncio.sleep(0)  # so that the event loop closes the transport
