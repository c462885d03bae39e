"""A shop in the manner of tau-bench: a database in the state, tools over it, and a customer who tells the wish late."""

from palaestra import Say, Task, ToolError, ToolStep, environment

USERS = {"u1": {"name": "Ada Stone", "city": "Berlin"}, "u2": {"name": "Bo Winter", "city": "Munich"}}
ORDERS = {"W1": {"status": "pending", "address": "Old Street 1"}, "W2": {"status": "pending", "address": "Hill 3"}}
POLICY = "You serve the customers of a shop. Find the customer by name and city first. Only pending orders can change."
CASES = [
    ("u1", "Please cancel order W1.", ToolStep("cancel", {"order": "W1"}), {"W1": {"status": "cancelled"}}),
    ("u2", "Send W2 to Lake 9.", ToolStep("move", {"order": "W2", "to": "Lake 9"}), {"W2": {"address": "Lake 9"}}),
]


@environment(toolsets=[])
def retail():
    prompt = [{"role": "system", "content": POLICY}, {"role": "user", "content": "Hello, I need help."}]
    for user, wish, step, changes in CASES:
        steps = [Say("Who are you?"), ToolStep("find_user", USERS[user]), Say("How can I help?"), step, Say("Done.")]
        yield Task(step.name, prompt, data={"user": user, "wish": wish, "changes": changes}, solution=steps)


@retail.state
def database():
    return {"orders": {number: dict(order) for number, order in ORDERS.items()}, "told": 0}


@retail.user
def customer(task, state):
    state["told"] += 1
    return [None, str(USERS[task.data["user"]]), task.data["wish"], None][min(state["told"], 3)]


def change(order, **values):
    if order is None or order["status"] != "pending":
        raise ToolError("not a pending order")
    order.update(values)
    return "done"


@retail.tool
def find_user(name: str, city: str) -> dict:
    """Find a customer by name and city."""
    return {"user": next((user for user, who in USERS.items() if who == {"name": name, "city": city}), None)}


@retail.tool
def cancel(order: str, *, state) -> str:
    """Cancel a pending order."""
    return change(state["orders"].get(order), status="cancelled")


@retail.tool
def move(order: str, to: str, *, state) -> str:
    """Change the address of a pending order."""
    return change(state["orders"].get(order), address=to)


@retail.score
def right(task, state):
    return state["orders"] == {number: order | task.data["changes"].get(number, {}) for number, order in ORDERS.items()}
