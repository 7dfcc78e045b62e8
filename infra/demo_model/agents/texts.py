"""Wordings of the turns of coding agents: what users ask, what agents' prompts say, how results of tools are framed.

The forms of paths, environments and results are those of common agents; the sentences are our own. The last entries of
each list are held out of training (``styles.pick``). Called by ``styles.py``, ``sources.py`` and ``turns.py``.
"""

from __future__ import annotations

from infra.demo_model.texts.lists import piped, split_words

ASKS = piped(
    "Read the file {f} and tell me what it says. | What does the file {f} say? | Read {f} and tell me what it says. | "
    "Read {f} | Read the file {f}. | What is in {f}? | What does {f} say? | Open {f} and tell me what is in it. | "
    "Show me {f}. | Show me the contents of {f}. | Please read {f} and tell me what it says. | "
    "Please read the file {f}. | Tell me what the file {f} says. | Tell me what is in the file {f}. | "
    "Can you read {f} and tell me what it says? | Could you read the file {f}? | What is written in {f}? | "
    "What's in {f}? | What's in the file {f}? | Read the file at {f} and tell me what it says. | "
    "Use the read tool on {f} and tell me what it says. | Look at {f} and tell me what it says. | "
    "Look into the file {f}: what does it say? | I need to know what {f} says. | Print the file {f}. | "
    "What are the contents of {f}? | Read {f} and report its contents. | Read {f} and answer with its contents. | "
    "read {f} and tell me what it says | what does {f} say | Have a look at {f}. What does it say? | "
    "The file {f}: what does it say? | Read the text file {f} and say what is in it. | "
    'Read `{f}` and tell me what it says. | Read "{f}" and tell me what it says. | What does `{f}` contain? | '
    "Read the file {f} with your tool, then tell me its text. | Read the file {f} and tell me exactly what it says. | "
    "There is a file {f}. What does it say? | Fetch the text of {f} for me. | What text does the file {f} contain? | "
    "Go and read {f}, then tell me what it says. | Would you tell me what {f} says?"
)
ASKS_TWICE = piped(
    "Now read {f}. | And what does {f} say? | Read {f} too. | And {f}? | What about {f}? | Now the file {f}. | "
    "Then read {f} and tell me what it says. | Read the file {f} as well. | Next, read {f}."
)
AGAIN = piped(
    "Say that again. | Can you repeat that? | Repeat your answer. | Once more | Repeat that | Say that again | "
    "say that again | What did you say? | Again please | What did the file say? | Please say that again. | "
    "What did it say? | Tell me again."
)
#: A message of the user around the question ``{q}``.
WRAPPERS = (
    "{q}", "{q}", "{q}", "{q}", "{q}", '"{q}"', '"{q}"\n', "{q}\n", "{r}\n\n{q}", "{r}{q}", "{r}\n{q}", "{q}\n\n{r}",
    "<user_query>\n{q}\n</user_query>", "{e}\n\n{q}", "{e}\n{r}\n{q}", "{r}\n\n{e}\n\n{q}", "<task>{q}</task>\n{e}",
    "# Request\n{q}",
)  # fmt: skip
#: Sections that name the working directory ``{d}``.
ENVIRONMENTS = (
    "# Environment\n - Primary working directory: {d}\n - Is a git repository: true\n - Platform: linux\n",
    "<env>\n  Working directory: {d}\n  Workspace root folder: {d}\n  Is directory a git repo: yes\n</env>",
    "<environment_context>\n  <cwd>{d}</cwd>\n  <shell>bash</shell>\n  <current_date>{t}</current_date>\n"
    "</environment_context>",
    "Today's date is {t}.\nMy operating system is: linux\nI'm currently working in the directory: {d}\n"
    "Here is the folder structure of the current working directories:\n\nShowing up to 20 items:\n\n{d}/\n",
    "Today is {t}. I am working in the directory {d}\nThe system is linux.",
    "<env>\nWorking directory: {d}\nIs directory a git repo: No\nPlatform: linux\nToday's date: {t}\n</env>",
    "The current working directory is {d}\nThe shell is bash.",
    "<environment>\n<cwd>{d}</cwd>\n<os>linux</os>\n</environment>",
    "Working directory: {d}\nDate: {t}",
    "I'm currently working in the directory: {d}\nToday's date is {t}.",
    "You are in {d}\nIt is {t}.",
)
REMINDERS = (
    "<system-reminder>\nYou can use the following context in your answers:\n# currentDate\nToday's date is {t}.\n\n"
    "      IMPORTANT: {s} {s}\n</system-reminder>\n",
    "<system-reminder>\n{s} {s}\n</system-reminder>",
    "<system-reminder>{s}</system-reminder>",
    "<system-reminder>\nThe list of tasks is empty. {s} Do not mention this to the user.\n</system-reminder>",
    "<instructions>\n# Rules of this repository\n- {s}\n- {s}\n- {s}\n</instructions>",
    "<permissions>\nCommands run in a sandbox. {s}\n</permissions>",
    "<context>\n{s} {s}\n</context>",
    "<system_notice>\n{s}\n</system_notice>",
)
#: Beginnings of prompts.
OPENINGS = piped(
    "You are a coding agent that works in a terminal. | You are an interactive agent that helps with software. | "
    "You are an assistant for programmers, run by a command line program. | You are a careful software engineer. | "
    "You are an interactive CLI agent for work on source code. | You help users with their code. | "
    "You are a coding agent. You are expected to be precise, safe and helpful."
)
#: Instructions as they stand in agents' prompts; ``{t}`` a tool, ``{p}`` a path, ``{s}`` a sentence, ``{a}`` a name.
RULES = piped(
    "Use `{t}` before you use `{t}`. | Never commit changes unless the user asks you to. | Keep answers short. | "
    "Prefer `{t}` to `{t}` when you look for files. | Do not add comments unless they are needed. | {s} | {s} | {s} | "
    "When you name code, write `{p}:{n}`, so that the user can find it. | Run the tests after every change. | "
    "If a command fails, read its output before you try again. | Never guess URLs. | The `{a}` must be unique. | "
    "Tools run in a sandbox; the network may be closed. | Answer in at most four lines. | "
    "Use absolute paths in `{a}`. | "
    'For example, `{p}` is changed with {t}({a}="{p}"). | Do not revert changes that you have not made. | '
    "Several calls may be made at once if they do not depend on each other. | Only use `{t}` if the user agrees. | "
    "The user sees only your text, not the results of {t}. | Plans have steps of five to seven words. | "
    "Look at neighbouring files such as {p} to learn the style of the project. | Do not print secrets. | "
    "Files named {p} hold instructions for you. | Use {t} to split large tasks. | **{h}**: {s} | **{h}**: {s} | "
    "`{a}` is optional. {s} | See {p} for more. | Mark each task as done with {t} at once. | "
    "When you are done, stop. | Do not use {t} for a file whose path you know. | Lines are cut after {n} characters."
)
#: Short dialogues that prompts give as examples.
EXAMPLES = (
    "<example>\nuser: {q}\nassistant: {s}\n</example>",
    "<example>\nuser: Where is {a} set?\nassistant: It is set in the function `{a}` in {p}:{n}.\n</example>",
    "<example>\nuser: which file holds {a}?\nassistant: {p}\n</example>",
    "<example>\nuser: run the tests\nassistant: [calls {t}]\nAll {n} tests pass.\n</example>",
    "```\n{t} --{a} {p}\n```",
    "| {a} | {h} |\n|---|---|\n| {p} | {s} |",
)
HEADINGS = piped(
    "Tone and style | Tools | How you work | Planning | Task execution | Presenting your work | Memory | Git | "
    "Safety | Following conventions | Proactiveness | Sandbox and approvals | Validating your work | Skills | "
    "Subagents | Hooks | Environment | Context management | Code references | Final answer | "
    "Progress updates | Ambition and precision"
)
#: Tools besides the one that reads, with the names of their arguments.
OTHER_TOOLS = (
    ("Bash", "command timeout description run_in_background"), ("Edit", "@ old_string new_string replace_all"),
    ("Write", "@ content"), ("Glob", "pattern path"), ("Grep", "pattern path glob output_mode head_limit multiline"),
    ("Task", "description prompt subagent_type"), ("TodoWrite", "todos"), ("WebFetch", "url prompt"),
    ("WebSearch", "query allowed_domains blocked_domains"), ("NotebookEdit", "notebook_path cell_id new_source"),
    ("ExitPlanMode", "plan"), ("KillShell", "shell_id"), ("BashOutput", "bash_id filter"), ("Skill", "skill args"),
    ("Agent", "description prompt subagent_type model isolation"), ("TaskCreate", "subject description metadata"),
    ("TaskGet", "taskId"), ("TaskList", ""), ("TaskStop", "task_id shell_id"), ("SendMessage", "to summary message"),
    ("TaskUpdate", "taskId subject status addBlocks owner"), ("TaskOutput", "task_id block timeout"),
    ("CronCreate", "cron prompt recurring"), ("CronDelete", "id"), ("CronList", ""), ("EnterWorktree", "name path"),
    ("ExitWorktree", "action discard_changes"), ("ScheduleWakeup", "delaySeconds reason prompt"),
    ("Workflow", "script name description args scriptPath"), ("ReportFindings", "level findings"),
    ("list_directory", "path ignore"), ("search_file_content", "pattern path include"), ("glob", "pattern path"),
    ("replace", "@ old_string new_string"), ("write_file", "@ content"), ("web_fetch", "url prompt format"),
    ("save_memory", "fact"), ("todo_write", "todos"), ("grep_search", "pattern glob path limit"),
    ("edit", "@ old_string new_string replace_all"), ("exit_plan_mode", "plan"), ("tool_search", "query max_results"),
    ("task", "description prompt subagent_type task_id"), ("todowrite", "todos"), ("todoread", ""), ("skill", "name"),
    ("webfetch", "url format timeout"), ("write", "@ content"), ("grep", "pattern path include"), ("list", "path"),
    ("apply_patch", "input"), ("update_plan", "explanation plan"), ("view_image", "path"), ("get_goal", ""),
    ("write_stdin", "session_id chars yield_time_ms"), ("request_user_input", "questions"), ("web_search", "query"),
    ("list_mcp_resources", "server cursor"), ("read_mcp_resource", "server uri"), ("spawn_agent", "message role"),
    ("create_goal", "objective token_budget"), ("update_goal", "status"), ("send_message", "task_id message"),
    ("monitor", "command description max_events directory"), ("ask_user", "question options"), ("lsp", "action path"),
    ("multi_edit", "@ edits"), ("create_file", "@ content"), ("delete_file", "@"), ("codesearch", "query limit"),
)  # fmt: skip
SHELLS = (("bash", "command timeout workdir"), ("Bash", "command timeout"), ("run_shell_command", "command directory"))
#: The beginning of the result of a command.
_RAN = "Chunk ID: {c}\nWall time: 0.0000 seconds\nProcess exited with code"
#: How results frame the text: ``{n}`` numbered lines, ``{x}`` plain text, ``{p}`` the path, ``{c}`` a code.
#: Of the first form in a pair is the number, the second frames the lines.
FRAMES = (
    ("", "{x}"), ("", "{x}\n"), ("", "{x}"),
    ("{i}\t", "{x}"), ("{i}\t", "{x}\n{e}\t"), ("{i:>6}→", "{x}"), ("{i:>6}\t", "{x}"),
    ("{i}: ", "<path>{p}</path>\n<type>file</type>\n<content>\n{x}\n\n(End of file - total {e} lines)\n</content>"),
    ("{i}: ", "<path>{p}</path>\n<type>file</type>\n<content>\n{x}\n</content>"),
    ("{i:05d}| ", "<file>\n{x}\n\n(End of file - total {e} lines)\n</file>"),
    ("", f"{_RAN} 0\nOriginal token count: {{e}}\nOutput:\n{{x}}\n"),
    ("", "Chunk ID: {c}\nWall time: 0.0{e} seconds\nProcess exited with code 0\nOutput:\n{x}\n"),
    ("", "Exit code: 0\nWall time: 0.{e} seconds\nOutput:\n{x}\n"),
    ("", "<file>\n{x}\n</file>"), ("", "<file path=\"{p}\">\n{x}\n</file>"), ("", "```\n{x}\n```"),
    ("", "--- {p} ---\n\n{x}\n\n"), ("", "stdout:\n{x}\n\nexit code: 0"),
    ("L{i}: ", "{x}"), ("", "<content>\n{x}\n</content>"), ("{i} | ", "{x}"),
)  # fmt: skip
#: Results of a read that failed.
FAILURES = (
    "File does not exist.", "<tool_use_error>File does not exist. Current working directory: {d}.</tool_use_error>",
    "cat: {p}: No such file or directory", "Error: ENOENT: no such file or directory, open '{p}'",
    "File not found: {p}", "Exit code: 1\nWall time: 0.1 seconds\nOutput:\ncat: {p}: No such file or directory\n",
    f"{_RAN} 1\nOutput:\ncat: {{p}}: No such file or directory\n",
    "File path must be absolute, but was relative: {p}. You must provide an absolute path.",
    "Permission denied: {p}", "The user refused the call.",
)  # fmt: skip
FOLDERS = split_words(
    "home user root tmp work workspace src project repo app code data docs files build opt srv var usr notes scratch "
    "test tests demo ws dev runner agent session folder box lib main site pytest-of-root pytest-0 "
    "claude codex qwen opencode"
)
STEMS = split_words(
    "notes readme README todo TODO story letter message hello data list info text file log plan recipe diary report "
    "summary poem greeting secret answer shopping config input output sample example test a b harbour garden"
)
ENDINGS = (".txt", ".txt", ".txt", ".txt", ".md", ".md", "", ".log", ".text", ".csv", ".json", ".py", ".ini", ".rst")
