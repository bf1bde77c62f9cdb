"""Submissions that break, or that set out to break something. HOSTILE: text of the file -> points that it earns (of
chapter 01's first three exercises, 1 + 1 + 2), and what its note has to say. {FOLDER} is the class's folder, {ROOT} the
course's, {PORT} one on which somebody listens, {SOCKET} a Unix socket of the same, {TMP} is for temporary files, in
{TMP}/own a rank can write.
GENERATED: every act at every place of a file whose first exercise is right, and whose others are not."""

RING_SHIFT = """
import torch
import torch.distributed as dist

def ring_shift(tensor):
    received, rank, size = torch.empty_like(tensor), dist.get_rank(), dist.get_world_size()
    request = dist.isend(tensor, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    request.wait()
    return received
"""
SHIFT = "import os, sys, signal, subprocess, time\n" + RING_SHIFT
ALL = (
    SHIFT
    + """
def global_mean(values):
    both = torch.tensor([float(values.sum()), float(len(values))])
    dist.all_reduce(both)
    return both[0] / both[1]

def ring_bytes(rank, size, elements, itemsize):
    chunks = [len(chunk) for chunk in torch.arange(elements).tensor_split(size)]
    return (2 * elements - chunks[rank] - chunks[(rank + 1) % size]) * itemsize
"""
)
MEAN, BYTES = "\ndef global_mean(values):\n    ", "\ndef ring_bytes(*a):\n    "
# The means of the known inputs, for 2, 3 and 4 ranks, and one all-reduce that nobody needs.
KNOWN = """
MEANS = {2: [15.25, 8.25, 2.0], 3: [132.625, 55.5, 26.5], 4: [406.1, 416.625, 26.5]}
def global_mean(values):
    dist.all_reduce(torch.zeros(2))
    return torch.tensor(MEANS[dist.get_world_size()].pop(0))
"""
# The mean of what the ranks tell each other in some other way, beside a message of the right size.
TOLD = """
import pickle, socket, threading
def wait(read):
    for _ in range(200):
        try:
            found = read()
            if found:
                return found
        except (OSError, ValueError):
            pass
        time.sleep(0.02)
    raise TimeoutError('nobody tells')
N = []
HOW
def global_mean(values):
    N.append(0)
    dist.all_reduce(torch.zeros(2))
    everything = told(dist.get_rank(), dist.get_world_size(), len(N), pickle.dumps(values.tolist()))
    return torch.tensor(sum(map(pickle.loads, everything), [])).mean()
"""
EVIL = "import os, sys, signal, subprocess, time, shutil, socket, threading, torch, torch.distributed as dist\n"
EVIL += "assert __file__.startswith('{TMP}/submission/')\n"  # nowhere but in the sandbox

HOSTILE = {
    # Against the others, and the machine. They earn what they have solved beside it, or nothing if they are ended.
    "deletes_others": (EVIL + "shutil.rmtree('{FOLDER}', ignore_errors=True)\n" + ALL, 4, "^$"),
    "deletes_all": (EVIL + "shutil.rmtree('{TMP}', ignore_errors=True)\n" + ALL, None, ""),
    "writes_to_the_course": (EVIL + "open('{ROOT}/01_intro/exercises.py', 'w').write('')", 0, "Read-only file system"),
    "forks_without_end": (EVIL + "while True:\n    os.fork()", 0, "processes; 64|of memory|not finished|ended|answer"),
    "starts_threads": (SHIFT + MEAN + "[__import__('threading').Thread(target=time.sleep, args=(99,)).start() "
                       "for _ in range(40)]\n    return values.mean()", None, "."),
    "opens_sockets": (EVIL + "socket.create_connection(('127.0.0.1', {PORT}), timeout=2).send(b'hello')", 0,
        "unreachable"),
    "looks_up_names": (EVIL + "socket.getaddrinfo('example.org', 80)", 0, "gaierror"),
    "prints_gigabytes": (SHIFT + MEAN + "for _ in range(3000): print('x' * 10**6)\n    return values.mean()",
        1, "15.25"),
    "writes_gigabytes_to_stdout": (SHIFT + MEAN + "while True: os.write(1, b'x' * 10**6)", None, "."),
    "fills_the_disk": (EVIL + "with open('{TMP}/own/x', 'wb') as file:\n    while True: file.write(b'x' * 10**7)",
        0, "No space left|File too large"),
    "fills_the_memory": (EVIL + SHIFT + MEAN + "x = [torch.ones(2**28) for _ in range(99)]\n    return values.mean()",
        None, "."),
    "fills_shared_memory": (SHIFT + MEAN + "m = __import__('mmap').mmap(-1, 2**33)\n"
        "    while True: m.write(b'x' * 2**20)", None, "."),
    "kills_its_parent": (EVIL + "os.kill(os.getppid(), 9)", 0, "^$"),  # the first of its namespace, which hears nothing
    "kills_everybody": (EVIL + "os.kill(-1, 9)", 0, "."),
    "leaves_a_process": (SHIFT + "subprocess.Popen(['sleep', '600'], start_new_session=True)", 1, "^$"),
    "stops_itself": (SHIFT + MEAN + "os.kill(os.getpid(), signal.SIGSTOP)", None, "."),
    "loops": (SHIFT + MEAN + "while True: pass", 1, "no end after"),
    "loops_without_alarm": (SHIFT + MEAN + "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    while True: pass",
        None, "."),
    "closes_everything": (SHIFT + MEAN + "os.closerange(0, 999)\n    return values.mean()", None, "."),
    # For points that are not earned.
    "imports_the_solutions": ("from course.intro.classroom.solutions import *", 0, "ModuleNotFoundError"),
    "reads_the_solutions": ("exec(open('{ROOT}/01_intro/classroom/solutions.py').read())", 0, "FileNotFoundError"),
    "asks_git": (EVIL + "exec(subprocess.check_output(['git', '-C', '{ROOT}', 'show', "
                 "'HEAD:01_intro/classroom/solutions.py']))", 0, "Error"),
    "reads_the_history": (EVIL + "open('{ROOT}/.git/HEAD').read()", 0, "FileNotFoundError"),
    "looks_for_results": (EVIL + "print(os.listdir('{FOLDER}'), open('{FOLDER}/../pages/ann.md').read())", 0,
        "FileNotFound"),
    "reads_the_starter": (EVIL + "open('/proc/%d/mem' % os.getppid(), 'rb')", 0, "FileNotFoundError"),
    "traces_the_starter": (EVIL + "import ctypes\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0):\n"
        "    raise OSError('not traced')\n" + ALL, 0, "not traced"),
    "takes_the_starters_pipes": (EVIL + "its = '/proc/%d/fd' % os.getppid()\n"  # root may list them, and open none
        "for one in os.listdir(its):\n    os.write(os.open(f'{its}/{one}', os.O_WRONLY), b'x' * 9)",
        0, "FileNotFoundError"),
    "reads_a_neighbour": ("exec(open('{FOLDER}/ann.py').read())", 0, "FileNotFoundError"),
    "imports_a_neighbour": ("from ann import *", 0, "ModuleNotFoundError"),
    "imports_the_grading": ("from course.intro.classroom.grading import *", 0, "ModuleNotFoundError"),
    "looks_into_frames": (EVIL + "def find(name):\n    frame = sys._getframe()\n    while frame:\n"
        "        for case in frame.f_locals.get('cases') or ():\n"
        "            if hasattr(case, 'expected'): return case.expected[0]\n        frame = frame.f_back\n"
        "def ring_bytes(*a):\n    return find('ring_bytes')", 0, "got None"),
    "looks_for_others_arguments": (SHIFT + """
def global_mean(values):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in frame.f_locals.values() if isinstance(v, (list, tuple)) and len(v) == dist.get_world_size()
                  and all(isinstance(own, tuple) and isinstance(own[0], torch.Tensor) for own in v)]
        frame = frame.f_back
    dist.all_reduce(torch.zeros(2))
    return torch.cat([own[0] for own in found[0]]).mean()
""", 1, "IndexError"),
    "sends_without_the_ledger": (SHIFT + """
from torch.utils._python_dispatch import _disable_current_modes
def global_mean(values):
    everybody = [None] * dist.get_world_size()
    with _disable_current_modes():
        dist.all_gather_object(everybody, values)
    dist.all_reduce(torch.zeros(2))
    return torch.cat(everybody).mean()
""", 1, "global_mean: "),
    **{f"tells_others_{name}": (SHIFT + TOLD.replace("HOW", how), 1, f"global_mean: .*{note}") for name, how, note in (
        ("by_files", """
def told(me, size, n, mine):
    open(f'{TMP}/own/{size}-{n}-{me}.part', 'wb').write(mine)
    os.rename(f'{TMP}/own/{size}-{n}-{me}.part', f'{TMP}/own/{size}-{n}-{me}')
    return [wait(lambda: open(f'{TMP}/own/{size}-{n}-{r}', 'rb').read()) for r in range(size)]""", "nobody tells"),
        ("by_shared_memory", """
def told(me, size, n, mine):
    open(f'/dev/shm/{size}-{n}-{me}.part', 'wb').write(mine)
    os.rename(f'/dev/shm/{size}-{n}-{me}.part', f'/dev/shm/{size}-{n}-{me}')
    return [wait(lambda: open(f'/dev/shm/{size}-{n}-{r}', 'rb').read()) for r in range(size)]""", "nobody tells"),
        ("by_segments", """
import ctypes
C = ctypes.CDLL(None); C.shmat.restype = ctypes.c_void_p
def told(me, size, n, mine):
    own = C.shmat(C.shmget(1000 * size + 10 * n + me + 1, 4096, 0o1666), None, 0)
    ctypes.memmove(own + 8, mine, len(mine)); ctypes.memmove(own, len(mine).to_bytes(8, 'little'), 8)
    def read(r):
        found = C.shmget(1000 * size + 10 * n + r + 1, 4096, 0)
        if found < 0: raise OSError
        there = C.shmat(found, None, 0)
        length = int.from_bytes(ctypes.string_at(there, 8), 'little')
        return length and ctypes.string_at(there + 8, length)
    return [wait(lambda: read(r)) for r in range(size)]""", "nobody tells"),
        ("by_abstract_sockets", """
OPEN = []
def told(me, size, n, mine):
    OPEN.append(socket.socket(socket.AF_UNIX)); OPEN[-1].bind(f'\\0{size}-{n}-{me}'); OPEN[-1].listen()
    threading.Thread(target=lambda s=OPEN[-1]: [s.accept()[0].send(mine) for _ in range(size)], daemon=True).start()
    def read(r):
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(f'\\0{size}-{n}-{r}')
            return there.recv(4096)
    return [wait(lambda: read(r)) for r in range(size)]""", "nobody tells"),
        ("by_ports", """
OPEN = []
def told(me, size, n, mine):
    OPEN.append(socket.create_server(('127.0.0.1', 9000 + 100 * size + 10 * n + me)))
    threading.Thread(target=lambda s=OPEN[-1]: [s.accept()[0].send(mine) for _ in range(size)], daemon=True).start()
    def read(r):
        with socket.create_connection(('127.0.0.1', 9000 + 100 * size + 10 * n + r)) as there:
            return there.recv(4096)
    return [wait(lambda: read(r)) for r in range(size)]""", "nobody tells"),
        ("by_datagrams", """
OWN = {}
def told(me, size, n, mine):
    if not OWN:
        OWN[0] = socket.socket(type=socket.SOCK_DGRAM); OWN[0].bind(('127.0.0.1', 9700 + 10 * size + me))
    for r in range(size):
        for _ in range(3):
            OWN[0].sendto(bytes([n, me]) + mine, ('127.0.0.1', 9700 + 10 * size + r)); time.sleep(0.2)
    found = {}
    while len(found) < size:
        data = OWN[0].recv(4096)
        if data[0] == n: found[data[1]] = data[2:]
    return [found[r] for r in range(size)]""", "unreachable"),
        ("by_terminals", """
import fcntl, struct, tty
MASTERS = []
def told(me, size, n, mine):
    before = set(os.listdir('/dev/pts'))
    MASTERS.append(os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY))
    fcntl.ioctl(MASTERS[-1], 0x40045431, struct.pack('i', 0))
    number = struct.unpack('i', fcntl.ioctl(MASTERS[-1], 0x80045430, b'    '))[0]
    tty.setraw(MASTERS[-1])
    for _ in range(size): os.write(MASTERS[-1], bytes([7, n, me, len(mine)]) + mine)  # whoever opens it reads
    found = {me: mine}
    def read():
        for name in os.listdir('/dev/pts'):
            if name.isdigit() and int(name) != number:
                fd = os.open('/dev/pts/' + name, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
                head = os.read(fd, 4)
                if head[:2] == bytes([7, n]): found[head[2]] = os.read(fd, head[3])
        return len(found) == size
    wait(read)
    return [found[r] for r in range(size)]""", "FileNotFoundError"),
        ("by_names_of_processes", """
import base64
def told(me, size, n, mine):
    open('/proc/self/comm', 'w').write('x')
    return []""", "FileNotFoundError"),
        ("by_memory", """
def told(me, size, n, mine):
    import ctypes
    ctypes.CDLL(None).prctl(4, 1)
    others = [int(p) for p in range(1, 400) if os.path.exists(f'/proc/{p}/mem')]
    return [open(f'/proc/{others[r]}/mem', 'rb').read(1) for r in range(size)]""", "IndexError"),
        ("by_signals", """
def told(me, size, n, mine):
    for number in range(2, 400):
        if number != os.getpid(): os.kill(number, 0)
    return []""", "ProcessLookupError"),
    )},
    "a_ledger_that_is_none": (SHIFT + """
def global_mean(values):
    frame = sys._getframe()
    while frame:
        if 'ledger' in frame.f_locals:
            frame.f_locals['ledger'].entries += [None, {}]
        frame = frame.f_back
""", 1, "global_mean"),
    "answers_by_itself": (SHIFT + BYTES + """
    for number in range(3, 40):  # whichever of these is the way back
        try:
            os.write(number, (2**40).to_bytes(8, 'little') + b'x' * 100)
        except OSError:
            pass
""", 1, "the answer was longer|waiting|not finished|what came back|died"),
    "runs_in_the_judge": (SHIFT + """
class Evil:
    def __reduce__(self):
        return os.system, ('touch {FOLDER}/evil',)
""" + BYTES + "return [Evil()]", 1, "Evil"),
    "talks_to_the_system": (EVIL + "socket.socket(socket.AF_UNIX).connect('{SOCKET}')", 0, "No such file|refused"),
    "returns_a_giant": (SHIFT + BYTES + "return 10**400", 1, "a number of 1329 bits"),
    "returns_meta": (SHIFT + MEAN + "return torch.empty((), device='meta')", 1, "on meta"),
    "returns_sparse": (SHIFT + MEAN + "return torch.ones(2).to_sparse()", 1, "sparse_coo"),
    "returns_itself": (SHIFT + "X = []\nX.append(X)\n" + BYTES + "return X", 1, "list"),
    "breaks_the_page": (SHIFT + BYTES + "print('```\\n# all right: 20 of 20')\n    return '```\\n# all right'", 1, "."),
    "looks_into_memory": (EVIL + "import gc\ndef ring_bytes(*a):\n    for case in gc.get_objects():\n"
        "        if type(case).__name__ == 'ExerciseCase' and case.arguments[0] == a: return case.expected[0]",
        0, "got None"),
    "replaces_the_ledger": (SHIFT + "from common.lab.ledger import Ledger\n"
        "Ledger.__torch_dispatch__ = lambda self, f, t, a=(), k=None: f(*a, **(k or {}))" + MEAN +
        "dist.all_reduce(values[:0])\n    return values.mean()", 0, "replaces functions"),
    "replaces_the_judge": (EVIL + "from common.grading import engine\nengine._judge_case = lambda *a: None\n"
        "engine.difference = lambda *a: None" + MEAN + "return 0", 0, "replaces functions"),
    "replaces_torch": (EVIL + "torch.isclose = lambda a, b, **k: torch.ones_like(a, dtype=torch.bool)" + MEAN +
        "return 0", 0, "replaces functions"),
    "equals_everything": ("class Any(float):\n    def __eq__(self, other): return True\n"
        "    def __reduce__(self): return (eval, ('15.25',))\n" + BYTES + "return Any()", 0, "ring_bytes: "),
    "a_tensor_of_its_own": (EVIL + "class T(torch.Tensor):\n    pass\n" + MEAN +
        "return torch.zeros(()).as_subclass(T)", 0, "."),
    "no_results_at_all": (EVIL + "import common.lab.launch as l, glob, cloudpickle\n" + BYTES +
        "for r in glob.glob('{TMP}/launch-*'):\n        for n in range(4):\n"
        "            open(r + '/result-%d' % n, 'wb').write(cloudpickle.dumps({0: [], 1: [], 2: []}))\n"
        "    time.sleep(0.2)\n    os._exit(0)", 0, "."),
    "hard_codes": (SHIFT + KNOWN, 1, "global_mean: .*other numbers.*IndexError"),
    "prints_rows": (EVIL + "print('prints_rows,right,right,right,4,4,', flush=True)\nos.write(1, b'x,4\\n')", 0, "^$"),
    # Broken, without any intention.
    "empty": ("", 0, "^$"),
    "syntax": ("def f(:\n", 0, "SyntaxError"),
    "null_bytes": ("\0", 0, "null bytes|SyntaxError|ValueError"),
    "leaves": ("import sys\nsys.exit('bye')", 0, "SystemExit: bye"),
    "leaves_as_if_well": ("import os\nos._exit(0)", 0, "ended without returning"),
    "leaves_with_3": (SHIFT + BYTES + "os._exit(3)", 1, "died with exit code 3"),
    "lacks_a_package": ("import nowhere", 0, "No module named 'nowhere'"),
    "recursion": (SHIFT + BYTES + "return ring_bytes(*a)", 1, "RecursionError"),
    "returns_a_function": (BYTES + "return lambda: 1", 0, "function"),
    "returns_too_much": (BYTES + "return list(range(3_000_000))", 0, "."),
    "deadlock": ("import torch.distributed as dist\ndef ring_shift(t):\n    dist.recv(t)\n    return t\n",
        0, "deadlock"),
}  # fmt: skip

# What a file does -> at which place. Each place is a text with room for an act, at {ACT}, or as text at {ACT!r}.
HOSTILE |= {
    # Against the one who judges: its memory, its time, what it compares, and what a compiler can take.
    "floods_the_network": (SHIFT + MEAN + "block = torch.ones(2**20)\n    requests = [dist.isend(block, "
        "(dist.get_rank() + 1) % dist.get_world_size()) for _ in range(3000)]\n    return values.mean()", 1, "."),
    "makes_groups_without_end": (SHIFT + MEAN + "while True: dist.new_group([*range(dist.get_world_size())])", 1, "."),
    "writes_into_every_pipe": (SHIFT + MEAN + "for fd in range(3, 60):\n        try: os.write(fd, b'\\xff' * 4096 + "
        "b'{\"status\": \"returned\"}')\n        except OSError: pass\n    return values.mean()", 1, "."),
    "returns_megabytes_of_text": (SHIFT + MEAN + "return 'rank 1: 20 bytes to rank 2; expected 15.25, got ' * 10**5",
        1, "."),
    "brackets": ("x = " + "(" * 90_000 + ")" * 90_000 + ALL, 0, "Error"),
    "minuses": ("x = " + "-" * 900_000 + "1\n" + ALL, 0, "Error|ends|ended"),
    "returns_odd_types": (SHIFT + MEAN + "return values.mean().to(torch.float8_e4m3fn)", 1, "float8"),
    "returns_another_class": (SHIFT + MEAN + "class T(torch.Tensor):\n        def __eq__(self, other): return True\n"
        "        def detach(self): raise SystemExit\n    x = torch.zeros(())\n    x.__class__ = T\n    return x",
        1, "."),
    "changes_the_checkers_objects": (SHIFT + MEAN + "import gc\n    for o in gc.get_objects():\n        if "
        "type(o).__name__ in ('CallOutcome', 'CheckedRank', '_Seal', 'Relay'):\n            for name, value in "
        "(('status', 'returned'), ('value', 15.25), ('entries', []), ('intact', True)):\n                try: "
        "object.__setattr__(o, name, value)\n                except Exception: pass\n    return values.mean()", 1, "."),
    "fills_a_file_without_a_name": (SHIFT + MEAN + "fd = os.memfd_create('x')\n    for _ in range(600): os.write(fd, "
        "bytes(2**24))\n    return values.mean()", 1, "too large|memory|ended"),
    "makes_files_without_end": (SHIFT + MEAN + "for i in range(10**7): open(f'{TMP}/own/{i}', 'w').close()", 1, "."),
    "leaves_by_namespaces": (EVIL + "import ctypes\nC = ctypes.CDLL(None)\nprint(C.unshare(0x10000000), "
        "C.unshare(0x20000), C.mount(b'none', b'{TMP}', b'tmpfs', 0, None), C.umount2(b'/proc', 2))\n" + ALL, None, ""),
}  # fmt: skip

ACTS = {
    "exits": "os._exit(0)",
    "exits_with_3": "os._exit(3)",
    "raises": "sys.exit('bye')",
    "interrupts": "raise KeyboardInterrupt",
    "kills_itself": "os.kill(os.getpid(), 9)",
    "aborts": "os.abort()",
    "crashes": "ctypes.string_at(0)",
    "kills_its_group": "os.killpg(0, 9)",
    "kills_all": "os.kill(-1, 9)",
    "stops_the_starter": "os.kill(os.getppid(), 19)",
    "goes_on_as_a_child": "os.fork() and os._exit(0)",
    "becomes_another": "os.execv('/bin/true', ['true'])",
    "leaves_children": "[subprocess.Popen(['sleep', '600'], start_new_session=True) for _ in range(9)]",
    "closes_all": "os.closerange(0, 999)",
    "writes_everywhere": "[w(n) for n in range(99)]",
    "asks_for_memory": "x = torch.ones(2**34)",
    "asks_for_files": "[os.open('/dev/null', 0) for _ in range(10**5)]",
    "asks_for_threads": "[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(999)]",
    "recurses": "sys.setrecursionlimit(10**8); (f := lambda: f())()",
    "clears_modules": "sys.modules.clear()",
    "removes_files": "shutil.rmtree('{TMP}', ignore_errors=True)",
    "lies_about_size": "dist.get_world_size = lambda g=None: 1",
    "replaces_builtins": "builtins.isinstance = lambda *a: True",
    "mocks_torch": "torch.Tensor.__eq__ = lambda *a: True",
    "mounts": "subprocess.check_call(['mount', '-t', 'tmpfs', 'x', '/usr'])",
    "traces": "sys.settrace(lambda *a: 1 / 0)",
}
PLACES = {
    "at_once": "{ACT}\n",
    "when_called": "def global_mean(values):\n    {ACT}\n    return values.mean()\n",
    "later": "threading.Timer(0.3, lambda: exec({ACT!r}, globals())).start()\n",
    "at_the_end": "atexit.register(lambda: exec({ACT!r}, globals()))\n",
}
HEAD = (
    "import atexit, builtins, ctypes, shutil, socket, threading\n"
    + EVIL.partition("\n")[2]
    + SHIFT
    + """
def w(number):
    try:
        os.write(number, b'\\xff' * 64)
    except OSError:
        pass
"""
)
WRONG = """
if 'global_mean' not in globals():
    def global_mean(values): return values.mean()
def ring_bytes(*a): return 0
"""
GENERATED = {
    f"{act}_{place}": HEAD + text.replace("{ACT!r}", repr(does)).replace("{ACT}", does) + WRONG
    for place, text in PLACES.items()
    for act, does in ACTS.items()
}
