"""A process that sends six messages to one conversation, each by its id, and is killed while it does.

    python killed_child.py FOLDER URL

It prints `ready` before the first message, one JSON line per answer, and `done` at the end. The tool `count` appends a
line to FOLDER/effects, which is what must never happen twice.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from palaestra import tool
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn_events import TurnEnded
from palaestra_tokens.config import APIServerConfig

MESSAGES = 6


async def main(folder: Path, url: str) -> None:
    @tool
    async def count(name: str) -> str:
        """Write a name down.

        Args:
            name: The name.
        """
        with (folder / "effects").open("a") as file:
            file.write(f"{name}\n")
        await asyncio.sleep(0.02)
        return f"counted {name}"

    settings = ChatSettings(toolsets=(), tools=[count])
    with ConversationStore(folder / "c.sqlite") as store:
        async with ChatService(APIServerConfig(base_url=url, model_name="echo"), store, settings) as service:
            people = People(notice=lambda notice: print(json.dumps({"notice": notice.text}), flush=True))
            known = store.conversations()
            conversation = Conversation.open(service, "last", people) if known else Conversation.begin(service, people)
            await service.engine(service.server)
            print("ready", flush=True)
            async for _ in conversation.resume():
                pass
            for number in range(MESSAGES):
                steps = "\n".join(f'call count {{"name": "{number}.{step}"}}' for step in range(3))
                async for event in conversation.send(f"{steps}\nsay answer {number}", message_id=f"m{number}"):
                    if isinstance(event, TurnEnded):
                        print(json.dumps({"message": number, "text": event.text}), flush=True)
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
