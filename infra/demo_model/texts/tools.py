"""Subjects of tools: names and descriptions of functions, questions that need them, and answers.

``exercises/tasks_tools.py`` makes exercises from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.demo_model.texts.lists import piped


@dataclass(frozen=True)
class Parameter:
    """An argument: the kind of its values, its possible names, and its description."""

    kind: str
    names: tuple[str, ...]
    about: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """What a tool is about.

    In ``asks`` and ``answers`` the arguments are ``{0}``, ``{1}``, … in the order of ``parameters``; ``{r}`` is the
    result. ``results`` names the kind of the result. Subjects of one ``group`` are never offered together, because one
    question could fit several of them.
    """

    group: str
    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    results: str
    answers: tuple[str, ...]


_PLACE = Parameter(
    "place",
    piped("city | location | place | town | city | location"),
    piped(
        "The city. | The city, e.g. Paris | Name of the city | The name of the place | "
        "City and country | A city | Where"
    ),
)
_PERSON = Parameter(
    "person",
    piped("name | person | who | contact | user | full_name | employee"),
    piped("The name | Name of the person | The person's name | Who | Full name"),
)
_THING = Parameter(
    "thing",
    piped("product | item | name | article | product_name"),
    piped("The product | Name of the item | The name of the product | What to look for"),
)
_MINUTES = Parameter("count", piped("minutes | duration | duration_minutes"), piped("In minutes | Number of minutes"))
_DAY = Parameter("day", piped("day | date | when"), piped("The day | Day of the week | Which day"))


def _number(names: str) -> Parameter:
    return Parameter("number", piped(names), piped("A number | The number | First or second number | Number"))


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        "weather",
        piped(
            "get_weather | weather | get_weather | get_current_weather | fetch_weather | "
            "getWeather | current_weather | "
            "weather_lookup | get_weather_report | weather_in | lookup_weather | get_forecast"
        ),
        piped(
            "The weather of a city. | Get the weather | Get the current weather | Get the current weather in a given "
            "location | Current weather for a city. | Returns the weather of a place. | Tells the weather | "
            "Get current weather for a location. | The weather in a place"
        ),
        (_PLACE,),
        piped(
            "What is the weather in {0}? | What is the weather in {0}? | What's the weather in {0}? | "
            "What's the weather like in {0}? | How is the weather in {0}? | Weather in {0}? | Weather in {0} | "
            "Tell me the weather in {0}. | Is it raining in {0}? | What is the weather like in {0} today? | "
            "What is the weather in {0} now? | How's the weather in {0} today? | Do I need an umbrella in {0}? | "
            "Is it warm in {0}? | Will it rain in {0}? | Give me the weather for {0} | Check the weather in {0}."
        ),
        "sky",
        piped("The weather in {0}: {r}."),
    ),
    Subject(
        "weather",
        piped("get_temperature | temperature | get_current_temperature | temperature_in | read_temperature"),
        piped("The temperature of a city. | Get the current temperature | Temperature at a place"),
        (_PLACE,),
        piped(
            "What is the temperature in {0}? | How warm is it in {0}? | How cold is it in {0}? | Temperature in {0}? | "
            "How many degrees is it in {0}? | Tell me the temperature in {0}."
        ),
        "degrees",
        piped("The temperature in {0}: {r}."),
    ),
    Subject(
        "weather",
        piped("get_forecast | weather_on_day | forecast | get_weather_for_day"),
        piped("The weather of a city on a day. | Get the forecast for a day | Weather forecast"),
        (_PLACE, _DAY),
        piped(
            "What is the weather in {0} on {1}? | Will it rain in {0} on {1}? | Weather in {0} on {1}? | "
            "What will the weather be like in {0} on {1}?"
        ),
        "sky",
        piped("The weather in {0} on {1}: {r}."),
    ),
    Subject(
        "time",
        piped(
            "get_time | time | current_time | get_current_time | getTime | time_in | local_time | world_clock | clock"
        ),
        piped(
            "The time in a city. | Get the current time | Get the local time of a place | Current time in a location | "
            "Tells what time it is"
        ),
        (_PLACE,),
        piped(
            "What time is it in {0}? | What is the time in {0}? | What's the time in {0}? | Time in {0}? | "
            "What time is it now in {0}? | Tell me the time in {0}. | How late is it in {0}? | Current time in {0}"
        ),
        "clock",
        piped("The time in {0}: {r}."),
    ),
    Subject(
        "phone",
        piped("get_phone_number | phone_number | find_phone | lookup_phone | phone_book | get_phone"),
        piped("The phone number of a person. | Look up a phone number | Finds phone numbers"),
        (_PERSON,),
        piped(
            "What is the phone number of {0}? | What is {0}'s phone number? | Phone number of {0}? | "
            "I need the phone number of {0}. | Find the phone number of {0}. | How can I call {0}?"
        ),
        "digits",
        piped("The phone number of {0}: {r}."),
    ),
    Subject(
        "mail",
        piped("get_email | find_email | email_of | lookup_email | get_email_address"),
        piped("The email address of a person. | Look up an email address | Finds the email of a person"),
        (_PERSON,),
        piped(
            "What is the email of {0}? | What is {0}'s email address? | Email of {0}? | "
            "Find the email address of {0}. | "
            "I need {0}'s email."
        ),
        "mail",
        piped("The email of {0}: {r}."),
    ),
    Subject(
        "person",
        piped(
            "lookup_person | find_person | search_person | get_person | who_is | find_user | "
            "get_employee | search_contacts"
        ),
        piped("Look up a person. | Facts about a person | Find a person by name | Search for people | Get a contact"),
        (_PERSON,),
        piped(
            "Who is {0}? | Look up {0}. | Find {0} | Look up the person {0} | What do you know about {0}? | "
            "Tell me about {0}. | Find the contact {0}. | Search for {0}"
        ),
        "job",
        piped("{0}: {r}."),
    ),
    Subject(
        "age",
        piped("get_age | age_of | lookup_age"),
        piped("The age of a person. | How old someone is"),
        (_PERSON,),
        piped("How old is {0}? | What is the age of {0}? | What is {0}'s age?"),
        "age",
        piped("The age of {0}: {r}."),
    ),
    Subject(
        "price",
        piped("get_price | price_of | lookup_price | price | check_price | get_product_price"),
        piped("The price of a product. | Look up a price | Get the price of an item"),
        (_THING,),
        piped(
            "How much is the {0}? | What does the {0} cost? | What is the price of the {0}? | Price of the {0}? | "
            "How much does a {0} cost?"
        ),
        "money",
        piped("The price of the {0}: {r}."),
    ),
    Subject(
        "shares",
        piped("get_stock_price | stock_price | lookup_stock | get_quote | share_price"),
        piped("The price of a stock. | Get the current stock price | Share price by symbol"),
        (Parameter("symbol", piped("symbol | ticker | company"), piped("The symbol | Ticker symbol, e.g. ABC")),),
        piped(
            "What is the stock price of {0}? | How is {0} stock doing? | Stock price of {0}? | "
            "What is the share price of {0}? | What is {0} trading at?"
        ),
        "money",
        piped("The stock price of {0}: {r}."),
    ),
    Subject(
        "stock",
        piped("check_stock | in_stock | get_inventory | stock_level | count_items"),
        piped("How many items are in stock. | Check the inventory | Stock of a product"),
        (_THING,),
        piped(
            "Is the {0} in stock? | How many {0}s are in stock? | Do we have a {0} in stock? | "
            "Check the stock of the {0}."
        ),
        "age",
        piped("In stock of the {0}: {r}."),
    ),
    Subject(
        "order",
        piped("get_order_status | order_status | track_order | lookup_order | get_order"),
        piped("The status of an order. | Look up an order | Track an order by its number"),
        (
            Parameter(
                "order", piped("order_id | order | id | order_number | number"), piped("The order id | Order number")
            ),
        ),
        piped(
            "Where is my order {0}? | What is the status of order {0}? | Status of order {0}? | Track order {0}. | "
            "Has order {0} been shipped?"
        ),
        "state",
        piped("The status of order {0}: {r}."),
    ),
    Subject(
        "population",
        piped("get_population | population | population_of | count_people"),
        piped("The population of a city. | How many people live in a place"),
        (_PLACE,),
        piped("What is the population of {0}? | How many people live in {0}? | Population of {0}? | How big is {0}?"),
        "large",
        piped("The population of {0}: {r}."),
    ),
    Subject(
        "distance",
        piped("get_distance | distance | distance_between | route_length | how_far"),
        piped("The distance between two cities. | Distance in km | How far two places are from each other"),
        (
            Parameter(
                "place", piped("from | start | origin | from_city | a"), piped("The start | Where from | First city")
            ),
            Parameter(
                "place", piped("to | end | destination | to_city | b"), piped("The end | Where to | Second city")
            ),
        ),
        piped(
            "How far is it from {0} to {1}? | What is the distance between {0} and {1}? | "
            "Distance from {0} to {1}? | "
            "How far is {0} from {1}?"
        ),
        "length",
        piped("From {0} to {1}: {r}."),
    ),
    Subject(
        "words",
        piped("define | get_definition | define_word | dictionary | lookup_word"),
        piped("The definition of a word. | Look up a word in the dictionary | Define a word"),
        (Parameter("word", piped("word | term | text"), piped("The word | A word to look up")),),
        piped(
            "What does {0} mean? | Define {0}. | What does the word {0} mean? | Look up the word {0}. | "
            "What is the definition of {0}?"
        ),
        "noun",
        piped("{0} means: {r}."),
    ),
    Subject(
        "translate",
        piped("translate | translate_text | translator | get_translation"),
        piped("Translate a text. | Translates a word into a language | Translate to another language"),
        (
            Parameter("word", piped("text | word | source"), piped("The text | What to translate")),
            Parameter(
                "language", piped("language | to | target | target_language"), piped("The language | Target language")
            ),
        ),
        piped("Translate {0} to {1}. | Translate {0} into {1} | What is {0} in {1}? | How do you say {0} in {1}?"),
        "invented",
        piped("{0} in {1}: {r}."),
    ),
    Subject(
        "math",
        piped("calculator | calculate | calc | evaluate | compute | math | do_math"),
        piped(
            "Calculates an expression. | Evaluate a math expression | A calculator | "
            "Do arithmetic | Calculator for sums"
        ),
        (
            Parameter(
                "expression",
                piped("expression | formula | input | expr"),
                piped("The expression | A math expression | e.g. 2 + 2"),
            ),
        ),
        piped(
            "What is {0}? | What is {0}? | Calculate {0} | Calculate {0}. | Compute {0}. | How much is {0}? | {0} | "
            "{0} = ? | Work out {0}. | Use the calculator: {0}"
        ),
        "value",
        piped("{0} = {r}"),
    ),
    Subject(
        "math",
        piped("add | add_numbers | sum | plus"),
        piped("Add two numbers. | The sum of two numbers"),
        (_number("a | x | first"), _number("b | y | second")),
        piped(
            "What is {0} plus {1}? | Add {0} and {1}. | What is the sum of {0} and {1}? | What is {0} + {1}? | "
            "{0} plus {1}?"
        ),
        "value",
        piped("{0} + {1} = {r}"),
    ),
    Subject(
        "math",
        piped("multiply | multiply_numbers | product | times"),
        piped("Multiply two numbers. | The product of two numbers"),
        (_number("a | x | first"), _number("b | y | second")),
        piped(
            "What is {0} times {1}? | Multiply {0} by {1}. | Multiply {0} and {1}. | "
            "What is {0} * {1}? | {0} times {1}?"
        ),
        "value",
        piped("{0} * {1} = {r}"),
    ),
    Subject(
        "convert",
        piped("convert_currency | exchange | currency_converter | convert"),
        piped("Convert money to another currency. | Currency conversion | Convert an amount"),
        (
            Parameter("number", piped("amount | value | sum"), piped("The amount | How much")),
            Parameter("currency", piped("from | from_currency | source"), piped("From this currency | Currency")),
            Parameter("currency", piped("to | to_currency | target"), piped("To this currency | Currency")),
        ),
        piped("Convert {0} {1} to {2}. | How much is {0} {1} in {2}? | What is {0} {1} in {2}? | {0} {1} in {2}?"),
        "number",
        piped("{0} {1} in {2}: {r}."),
    ),
    Subject(
        "timer",
        piped("set_timer | start_timer | timer | set_alarm"),
        piped("Set a timer. | Start a timer | Set a timer in minutes"),
        (_MINUTES,),
        piped(
            "Set a timer for {0} minutes. | Start a timer of {0} minutes | Timer for {0} minutes | "
            "Wake me in {0} minutes. | Remind me in {0} minutes"
        ),
        "done",
        piped("Timer for {0} minutes: {r}."),
    ),
    Subject(
        "music",
        piped("play_music | play_song | play | start_music | music"),
        piped("Play music. | Play a song | Play music of an artist"),
        (Parameter("person", piped("artist | name | band | query"), piped("The artist | Who plays")),),
        piped("Play music by {0}. | Play a song by {0} | Play {0} | Play something by {0}. | I want to hear {0}."),
        "done",
        piped("Music by {0}: {r}."),
    ),
    Subject(
        "light",
        piped("turn_on_light | light_on | lights | switch_on_light | set_light"),
        piped("Turn on the light in a room. | Switch on a light | Control the lights"),
        (Parameter("room", piped("room | place | where"), piped("The room | Which room")),),
        piped(
            "Turn on the light in the {0}. | Switch on the light in the {0} | Light in the {0}, please. | "
            "Turn the {0} light on."
        ),
        "done",
        piped("Light in the {0}: {r}."),
    ),
    Subject(
        "message",
        piped("send_message | send_email | message | text_person | send_sms"),
        piped("Send a message to a person. | Send an email | Sends a text"),
        (
            Parameter("person", piped("to | recipient | name"), piped("Who gets it | The recipient")),
            Parameter("saying", piped("text | message | body | content"), piped("The text | What to say")),
        ),
        piped("Send {0} the message {1}. | Send a message to {0}: {1} | Tell {0}: {1} | Write to {0}: {1}"),
        "done",
        piped("Message to {0}: {r}."),
    ),
    Subject(
        "search",
        piped("search | search_web | web_search | google | search_internet | find"),
        piped("Search the web. | Search the internet for a text | Web search"),
        (Parameter("topic", piped("query | q | text | search_term"), piped("The query | What to search for")),),
        piped(
            "Search the web for {0}. | Search for {0} | Find something about {0} on the web | "
            "Look up {0} on the internet | "
            "Search {0}"
        ),
        "sentence",
        piped("I found this: {r}."),
    ),
    Subject(
        "news",
        piped("get_news | news | latest_news | fetch_news | headlines"),
        piped("The news about a topic. | Get the latest news | Headlines"),
        (Parameter("topic", piped("topic | about | subject | query"), piped("The topic | About what")),),
        piped(
            "What is the news about {0}? | News about {0}? | What is new about {0}? | Any news about {0}? | "
            "Give me the news on {0}."
        ),
        "sentence",
        piped("The news about {0}: {r}."),
    ),
    Subject(
        "book",
        piped("book_table | reserve_table | make_reservation"),
        piped("Book a table. | Reserve a table in a restaurant"),
        (Parameter("count", piped("people | guests | seats"), piped("Number of people | How many")), _DAY),
        piped("Book a table for {0} on {1}. | Reserve a table for {0} people on {1}. | I need a table for {0} on {1}."),
        "done",
        piped("Table for {0} on {1}: {r}."),
    ),
    Subject(
        "hotel",
        piped("find_hotel | search_hotels | hotels | get_hotel"),
        piped("Find a hotel in a city. | Search hotels"),
        (_PLACE,),
        piped("Find a hotel in {0}. | I need a hotel in {0} | Which hotel is good in {0}? | Hotels in {0}?"),
        "named",
        piped("A hotel in {0}: {r}."),
    ),
    Subject(
        "file",
        piped("read_file | open_file | cat | get_file"),
        piped("Read a file. | The text of a file | Opens a file"),
        (Parameter("path", piped("path | file | filename | name"), piped("The path | Name of the file")),),
        piped("Read the file {0}. | What is in {0}? | Open {0} | Show me the file {0} | Read {0}"),
        "sentence",
        piped("The file {0} says: {r}."),
    ),
    Subject(
        "flight",
        piped("flight_status | get_flight | track_flight | lookup_flight"),
        piped("The status of a flight. | Look up a flight"),
        (Parameter("flight", piped("flight | number | flight_number | id"), piped("The flight | Flight number")),),
        piped("Is flight {0} on time? | What is the status of flight {0}? | Flight {0}? | When does flight {0} land?"),
        "state",
        piped("Flight {0}: {r}."),
    ),
)

#: Function names, descriptions and questions for a noun that no subject has: ``{n}`` in text, ``{f}`` in a name.
ANY_NAMES = piped(
    "get_{f} | find_{f} | lookup_{f} | {f} | {f}_of | get_{f}_of | fetch_{f} | {f}_lookup | query_{f} | read_{f} | "
    "search_{f} | show_{f} | get_current_{f} | check_{f}"
)
ANY_ABOUT = piped(
    "The {n}. | Get the {n} | Get the {n} of something | Returns the {n} | Look up the {n} | Tells the {n} | "
    "Finds the {n} by name | Use this for the {n}."
)
ANY_PARAMETERS = piped("name | id | key | of | query | value | item | who | place | city | target | subject | topic")
ANY_ASKS = piped(
    "What is the {n} of {0}? | What is the {n} of {0}? | What is {0}'s {n}? | Get the {n} of {0}. | {n} of {0}? | "
    "What is the {n} for {0}? | Tell me the {n} of {0}. | Find the {n} of {0} | Look up the {n} of {0}. | "
    "Which {n} does {0} have? | I need the {n} of {0}. | Show me the {n} of {0} | Check the {n} of {0}. | "
    "What is the {n} in {0}?"
)
MORE_NOUNS = piped(
    "balance | status | score | level | rank | address | birthday | salary | title | author | owner | manager | "
    "capacity | speed | weight | height | length | color | size | code | password hint | version | license | rating | "
    "grade | team | country | language | currency | climate | altitude | area | mayor | budget | schedule | calendar | "
    "menu | recipe | invoice | account | battery | signal | fuel | traffic | tide | sunrise | sunset | humidity | "
    "wind speed | air quality | zip code | area code | time zone | exchange rate | tax rate | discount | warranty"
)
