"""The shop of tau2-bench (https://arxiv.org/abs/2506.07982): an agent serves a customer whom a model plays.

    pip install --no-deps inspect_evals
    palaestra eval examples/tau2_retail.py --model NAME --base-url URL --env.user_model NAME --env.user_url URL

Policy, database and tasks come from the package, or from a folder `data` with the same files. Without `user_model`, the
customer says everything in the first message and answers nothing. The reward is 1 if the agent left the database as the
reference does and told the customer what they need to know.
"""

# ruff: noqa: A002 - the arguments have the names of the benchmark

import ast
import gzip
import json
import operator
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from palaestra import ChatModel, Say, Score, Task, ToolError, ToolStep, environment

AGENT = "You serve the customers of a shop. Follow the policy. In each turn, write to the customer or call a tool."
STOPS = ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"]
CHANGES = ("cancel_", "exchange_", "modify_", "return_")  # how the names of tools begin that change the database
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@cache
def database(data):
    return json.loads(gzip.decompress(Path(data, "domains/retail/db.json.gz").read_bytes()))


@environment(toolsets=[], max_turns=200, temperature=0.0)
def tau2_retail(data: str = "", split: str = "base", user_model: str = "", user_url: str = "http://localhost:8000/v1"):
    data = data or str(files("inspect_evals") / "tau2/data")
    folder, rules = Path(data, "domains/retail"), Path(data, "user_simulator/simulation_guidelines.txt").read_text()
    prompt = [{"role": "system", "content": f"{AGENT}\n\n{(folder / 'policy.txt').read_text()}"}]
    chosen = json.loads((folder / "split_tasks.json").read_text())[split]
    for row in json.loads((folder / "tasks.json").read_text()):
        if row["id"] not in chosen:
            continue
        wanted, case = row["evaluation_criteria"], row["user_scenario"]["instructions"]
        actions, told = [(each["name"], each["arguments"]) for each in wanted["actions"]], wanted["communicate_info"]
        scenario = "\n".join(f"{name}: {text}" for name, text in case.items() if text)
        player = {"model": user_model, "url": user_url, "scenario": scenario, "rules": rules}
        yield Task(
            row["id"],
            prompt,
            data={"data": data, "player": player, "wish": case["reason_for_call"]},
            answer={"actions": actions, "told": told},
            solution=[*(ToolStep(*each) for each in actions), Say(" ".join(told) or "Done.")],
            floor=float(not told and not any(name.startswith(CHANGES) for name, _ in actions)),
        )


@dataclass
class Shop:
    """The users and orders that were looked up, as they are now. The others are those of the database."""

    data: str
    users: dict
    orders: dict


@tau2_retail.state
def opened(task) -> Shop:
    return Shop(task.data["data"], {}, {})


@tau2_retail.user
async def customer(task, messages):
    player = task.data["player"]
    if not player["model"]:
        return task.data["wish"] if messages[-1]["role"] == "system" else None
    model = ChatModel(player["model"], base_url=player["url"])
    return await model.play_user(player["scenario"], messages, rules=player["rules"], stop=STOPS)


@tau2_retail.score
def served(task, state, rollout):
    reference, tools = opened(task), {each.name: each for each in tau2_retail.tools}
    for name, arguments in task.answer["actions"]:
        with suppress(ToolError):
            if name.startswith(CHANGES):
                tools[name](**arguments, shop=reference)
    rows = database(state.data)
    same = rows["users"] | state.users == rows["users"] | reference.users
    same = same and rows["orders"] | state.orders == rows["orders"] | reference.orders
    replies = [each for each in rollout.messages if each["role"] == "assistant" and not each.get("tool_calls")]
    said = "\n".join(each["content"] or "" for each in replies).lower().replace(",", "")
    told = all(each.lower() in said for each in task.answer["told"])
    return Score(float(same and told), {"same": float(same), "told": float(told)})


def need(condition, otherwise):
    if not condition:
        raise ToolError(otherwise)


def found(shop, table, key):
    rows = database(shop.data)[table]
    need(key in rows, f"there is no {key} among the {table}")
    return rows[key] if table == "products" else getattr(shop, table).setdefault(key, deepcopy(rows[key]))


def found_order(shop, order_id, *states):
    order = found(shop, "orders", order_id)
    need(order["status"] in states, f"the status of order {order_id} is {order['status']}")
    return order


def found_payment(shop, user_id, payment_method_id, price=0.0):
    method = found(shop, "users", user_id)["payment_methods"].get(payment_method_id)
    need(method, f"the user has no payment method {payment_method_id}")
    need(method.get("balance", price) >= price, "the gift card has not enough money")
    return method


def found_user_id(shop, fits):
    users = database(shop.data)["users"] | shop.users
    user_id = next((user_id for user_id, user in users.items() if fits(user)), None)
    need(user_id, "there is no such user")
    return user_id


def check_items(order, item_ids):
    need(Counter(item_ids) <= Counter(each["item_id"] for each in order["items"]), "the order has no such items")


def found_variants(shop, order, item_ids, new_item_ids):
    """Return the variants that replace these items, and how much more they cost."""
    check_items(order, item_ids)
    need(len(item_ids) == len(new_item_ids), "there are not as many new items as old ones")
    variants, more = [], 0.0
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = item_of(order, item_id)
        variant = found(shop, "products", item["product_id"])["variants"].get(new_item_id)
        need(variant and variant["available"], f"item {new_item_id} is not available")
        variants.append(variant)
        more += variant["price"] - item["price"]
    return variants, more


def item_of(order, item_id):
    return next(each for each in order["items"] if each["item_id"] == item_id)


def payment(kind, amount, payment_method_id):
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


def credit(method, amount):
    if method["source"] == "gift_card":
        method["balance"] = round(method["balance"] + amount, 2)


def value_of(node):
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value_of(left), value_of(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -value_of(operand)
    raise SyntaxError("use numbers, +, -, *, / and parentheses")


@tau2_retail.tool
def calculate(expression: str) -> str:
    """Calculate an expression of numbers, +, -, *, / and parentheses, such as `2 * (3 + 4.5)`."""
    try:
        return str(round(value_of(ast.parse(expression.strip(), mode="eval").body), 2))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(str(error)) from None


@tau2_retail.tool
def transfer_to_human_agents(summary: str) -> str:
    """Transfer the user to a human, with a summary, if the user asks for one or the policy leaves no other help."""
    return "transferred"


@tau2_retail.tool
def find_user_id_by_email(email: str, *, shop: Shop) -> str:
    """Find a user's id by email."""
    return found_user_id(shop, lambda user: user["email"].lower() == email.lower())


@tau2_retail.tool
def find_user_id_by_name_zip(first_name: str, last_name: str, zip: str, *, shop: Shop) -> str:
    """Find a user's id by name and zip code, for users who cannot give their email."""
    wanted = (first_name.lower(), last_name.lower(), zip)
    name = operator.itemgetter("first_name", "last_name")
    return found_user_id(shop, lambda user: (*map(str.lower, name(user["name"])), user["address"]["zip"]) == wanted)


@tau2_retail.tool
def get_user_details(user_id: str, *, shop: Shop) -> dict:
    """Get a user's name, address, payment methods and order ids."""
    return found(shop, "users", user_id)


@tau2_retail.tool
def get_order_details(order_id: str, *, shop: Shop) -> dict:
    """Get the status and the items of an order, such as `#W0000000`."""
    return found(shop, "orders", order_id)


@tau2_retail.tool
def get_product_details(product_id: str, *, shop: Shop) -> dict:
    """Get a product and its variants. A product id is not an item id."""
    return found(shop, "products", product_id)


@tau2_retail.tool
def list_all_product_types(*, shop: Shop) -> dict:
    """List the names and product ids of all products."""
    return dict(sorted((each["name"], each["product_id"]) for each in database(shop.data)["products"].values()))


@tau2_retail.tool
def cancel_pending_order(order_id: str, reason: str, *, shop: Shop) -> dict:
    """Cancel and refund a pending order that the user has confirmed to cancel. The reason is `no longer needed` or
    `ordered by mistake`."""
    order = found_order(shop, order_id, "pending")
    need(reason in ("no longer needed", "ordered by mistake"), "the reason is not one of the two")
    for paid in tuple(order["payment_history"]):
        credit(found_payment(shop, order["user_id"], paid["payment_method_id"]), paid["amount"])
        order["payment_history"].append(payment("refund", paid["amount"], paid["payment_method_id"]))
    order |= {"status": "cancelled", "cancel_reason": reason}
    return order


@tau2_retail.tool
def exchange_delivered_order_items(
    order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str, *, shop: Shop
) -> dict:
    """Exchange items of a delivered order for others of the same products, in the same sequence, once the user has
    confirmed it. The payment method pays or gets the difference. An order can be exchanged or returned only once."""
    order = found_order(shop, order_id, "delivered")
    more = round(found_variants(shop, order, item_ids, new_item_ids)[1], 2)
    found_payment(shop, order["user_id"], payment_method_id, more)
    order |= {"exchange_items": sorted(item_ids), "exchange_new_items": sorted(new_item_ids)}
    order |= {"exchange_payment_method_id": payment_method_id, "exchange_price_difference": more}
    order["status"] = "exchange requested"
    return order


@tau2_retail.tool
def return_delivered_order_items(order_id: str, item_ids: list[str], payment_method_id: str, *, shop: Shop) -> dict:
    """Return items of a delivered order, once the user has confirmed it. The refund goes to the payment method of the
    order or to a gift card."""
    order = found_order(shop, order_id, "delivered")
    method, paid = found_payment(shop, order["user_id"], payment_method_id), order["payment_history"][0]
    need(payment_method_id == paid["payment_method_id"] or method["source"] == "gift_card", "wrong payment method")
    check_items(order, item_ids)
    order |= {"return_items": sorted(item_ids), "return_payment_method_id": payment_method_id}
    order["status"] = "return requested"
    return order


@tau2_retail.tool
def modify_pending_order_items(
    order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str, *, shop: Shop
) -> dict:
    """Replace items of a pending order with others of the same products, in the same sequence, once the user has
    confirmed it. The payment method pays or gets the difference. This can be done only once for an order."""
    order = found_order(shop, order_id, "pending")
    variants, more = found_variants(shop, order, item_ids, new_item_ids)
    need(all(map(operator.ne, item_ids, new_item_ids)), "a new item is the old one")
    method = found_payment(shop, order["user_id"], payment_method_id, more)
    order["payment_history"].append(payment("payment" if more > 0 else "refund", abs(more), payment_method_id))
    credit(method, -more)
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):  # the original gives all the last one's price
        last = {"price": variants[-1]["price"], "options": variants[-1]["options"]}
        item_of(order, item_id).update(last, item_id=new_item_id)
    order["status"] = "pending (item modified)"
    return order


@tau2_retail.tool
def modify_pending_order_payment(order_id: str, payment_method_id: str, *, shop: Shop) -> dict:
    """Change the payment method of a pending order, once the user has confirmed it."""
    order = found_order(shop, order_id, "pending", "pending (item modified)")
    paid, *others = order["payment_history"]
    method = found_payment(shop, order["user_id"], payment_method_id, paid["amount"])
    need(not others and paid["transaction_type"] == "payment", "the order has not exactly one payment")
    need(payment_method_id != paid["payment_method_id"], "this is the order's payment method")
    for kind, way in (("payment", payment_method_id), ("refund", paid["payment_method_id"])):
        order["payment_history"].append(payment(kind, paid["amount"], way))
    credit(method, -paid["amount"])
    credit(found_payment(shop, order["user_id"], paid["payment_method_id"]), paid["amount"])
    return order


@tau2_retail.tool
def modify_pending_order_address(
    order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str, *, shop: Shop
) -> dict:
    """Change the address of a pending order, once the user has confirmed it."""
    order = found_order(shop, order_id, "pending", "pending (item modified)")
    order["address"] = address(address1, address2, city, state, country, zip)
    return order


@tau2_retail.tool
def modify_user_address(
    user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str, *, shop: Shop
) -> dict:
    """Change a user's default address, once the user has confirmed it."""
    user = found(shop, "users", user_id)
    user["address"] = address(address1, address2, city, state, country, zip)
    return user


def address(address1, address2, city, state, country, zip):
    return {"address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip}
