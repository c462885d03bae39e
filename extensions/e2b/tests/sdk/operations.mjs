// Operations of the E2B SDK for JavaScript, whose results are printed one a line: the same as operations.py.
import {
  AuthenticationError, CommandExitError, FileNotFoundError, InvalidArgumentError, NotFoundError, Sandbox,
  SandboxNotFoundError, Template, TimeoutError,
} from 'e2b'

let count = 0
const op = (name, result) => console.log(`${++count} ${name}: ${JSON.stringify(result)}`)
const refused = async (kind, call) => {
  try { await call() } catch (error) {
    if (error instanceof kind) return 'refused'
    throw error
  }
  return 'accepted'
}
const sleep = (ms) => new Promise((done) => setTimeout(done, ms))
const until = async (condition) => {
  const end = Date.now() + 20000
  while (!condition()) {
    if (Date.now() > end) throw new Error('it did not happen in time')
    await sleep(50)
  }
}
const text = new TextEncoder()

const tag = { run: 'sixty' }
const box = await Sandbox.create({ timeoutMs: 120000, metadata: tag, envs: { OUTER: 'o' } })
op('create', Boolean(box.sandboxId))
op('is running', await box.isRunning())
let info = await box.getInfo()
op('info: metadata', info.metadata)
op('info: state', info.state)
op('info: template', info.templateId)
const running = { metadata: tag, state: ['running'] }
op('list by metadata', (await Sandbox.list({ query: running }).nextItems()).map((each) => each.sandboxId === box.sandboxId))
op('list by other metadata', (await Sandbox.list({ query: { metadata: { run: 'x' } } }).nextItems()).length)
const second = await Sandbox.create({ timeoutMs: 120000, metadata: tag })
const pages = Sandbox.list({ query: running, limit: 1 })
const firstPage = await pages.nextItems()
op('list: first page', [firstPage.length, pages.hasNext])
const secondPage = await pages.nextItems()
op('list: second page', [secondPage.length, pages.hasNext])
op('kill', await second.kill())
op('kill again', await second.kill())
op('info of a killed one', await refused(SandboxNotFoundError, () => second.getInfo()))
await box.setTimeout(300000)
info = await box.getInfo()
const left = (info.endAt - info.startedAt) / 1000
op('set timeout', left > 290 && left < 320)
op('metrics', (await box.getMetrics())[0].memTotal > 0)
op('wrong key', await refused(AuthenticationError, () => Sandbox.create({ apiKey: 'e2b_wrong_key' })))
op('unknown template', await refused(Error, () => Sandbox.create('no-such-template')))

let ran = await box.commands.run('echo out; echo err >&2; echo $OUTER $INNER; pwd', { envs: { INNER: 'i' } })
op('run: stdout', ran.stdout)
op('run: stderr', ran.stderr)
op('run: exit code', ran.exitCode)
try { await box.commands.run('echo partly; exit 7') } catch (error) {
  if (!(error instanceof CommandExitError)) throw error
  op('run: failure', [error.exitCode, error.stdout])
}
op('run: cwd', (await box.commands.run('pwd', { cwd: '/tmp' })).stdout)
op('run: root', (await box.commands.run('echo $HOME; id -u', { user: 'root' })).stdout)
op('run: timeout', await refused(TimeoutError, () => box.commands.run('sleep 30', { timeoutMs: 500 })))
let pieces = ''
await box.commands.run('echo one; sleep 0.3; echo two', { onStdout: (data) => { pieces += data } })
op('run: callbacks', pieces)
op('run: long output', (await box.commands.run('seq 1 100000')).stdout.length)
op('run: unicode', (await box.commands.run("printf 'h\\303\\251'")).stdout)
const handle = await box.commands.run('read line; echo got $line; cat', { background: true, stdin: true })
op('background: listed', (await box.commands.list()).map((each) => each.pid === handle.pid))
await box.commands.sendStdin(handle.pid, 'first\n')
await box.commands.sendStdin(handle.pid, 'second\n')
await box.commands.closeStdin(handle.pid)
op('background: input and output', (await handle.wait()).stdout)
const sleeper = await box.commands.run('sleep 100', { background: true })
op('background: kill', await box.commands.kill(sleeper.pid))
op('background: kill again', await box.commands.kill(sleeper.pid))
await sleeper.wait().catch(() => {})
const talker = await box.commands.run('read x; echo later', { background: true, stdin: true })
await talker.disconnect()
const followed = await box.commands.connect(talker.pid)
await box.commands.sendStdin(talker.pid, '\n')
op('background: connect', (await followed.wait()).stdout)
op('background: connect to nothing', await refused(NotFoundError, () => box.commands.connect(99999)))

let shown = ''
const onData = (data) => { shown += new TextDecoder().decode(data) }
let pty = await box.pty.create({ rows: 30, cols: 100, onData })
await box.pty.sendInput(pty.pid, text.encode('stty size; exit\n'))
await pty.wait()
op('pty: size', shown.includes('30 100'))
shown = ''
pty = await box.pty.create({ rows: 30, cols: 100, onData })
await box.pty.resize(pty.pid, { rows: 40, cols: 90 })
await box.pty.sendInput(pty.pid, text.encode('stty size; exit\n'))
await pty.wait()
op('pty: resize', shown.includes('40 90'))
pty = await box.pty.create({ rows: 30, cols: 100, onData })
op('pty: kill', await box.pty.kill(pty.pid))
await pty.wait().catch(() => {})

op('files: write', (await box.files.write('notes/a.txt', 'hello')).path)
op('files: read', await box.files.read('notes/a.txt'))
op('files: read bytes', [...(await box.files.read('notes/a.txt', { format: 'bytes' }))])
op('files: overwrite', [(await box.files.write('notes/a.txt', 'bye')).name, await box.files.read('notes/a.txt')])
const several = [{ path: 'notes/b', data: '1' }, { path: '/tmp/c', data: '2' }]
op('files: write several', (await box.files.write(several)).map((each) => each.path))
op('files: read nothing', await refused(FileNotFoundError, () => box.files.read('none')))
op('files: exists', [await box.files.exists('notes/a.txt'), await box.files.exists('none')])
const entry = await box.files.getInfo('notes/a.txt')
op('files: info', [entry.name, entry.type, entry.size, entry.permissions])
op('files: make directory', [await box.files.makeDir('d/e'), await box.files.makeDir('d/e')])
op('files: list', (await box.files.list('notes')).map((each) => each.name).sort())
op('files: list deep', (await box.files.list('/home/user/d', { depth: 2 })).map((each) => each.path).sort())
op('files: list a file', await refused(InvalidArgumentError, () => box.files.list('notes/a.txt')))
op('files: rename', (await box.files.rename('notes/a.txt', 'notes/z.txt')).path)
await box.files.remove('notes/b')
op('files: remove', await box.files.exists('notes/b'))
const large = 'x'.repeat(12_000_000)
await box.files.write('large', large)
op('files: large', (await box.files.read('large')) === large)
let streamed = 0
for await (const piece of await box.files.read('large', { format: 'stream' })) streamed += piece.length
op('files: stream', streamed)
const seen = new Set()
const watch = await box.files.watchDir('d', (event) => seen.add(event.type))
await box.files.write('d/new', 'x')
await until(() => seen.has('create') && seen.has('write'))
op('files: watch', [...seen].sort())
await watch.stop()
op('files: download address', await (await fetch(await box.downloadUrl('notes/z.txt'))).text())

const forks = await box.fork({ count: 2 })
await forks[0].files.write('notes/z.txt', 'of the fork')
op('fork', await Promise.all([...forks, box].map((each) => each.files.read('notes/z.txt'))))
op('fork: kill', await Promise.all(forks.map((each) => each.kill())))
const snapshot = await box.createSnapshot()
const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60000 })
op('snapshot', await copy.files.read('notes/z.txt'))
await copy.kill()
const snapshots = async () => (await Sandbox.listSnapshots({ sandboxId: box.sandboxId }).nextItems()).length
op('snapshot: list and delete', [await snapshots(), await Sandbox.deleteSnapshot(snapshot.snapshotId), await snapshots()])
const counter = await box.commands.run('while true; do date +%s%N > /tmp/now; sleep 0.02; done', { background: true })
counter.wait().catch(() => {})
op('pause', [await box.pause(), await box.isRunning(), await box.pause()])
const again = await Sandbox.connect(box.sandboxId)
op('connect', [await again.isRunning(), await again.commands.kill(counter.pid)])
op('template exists', [await Template.exists('base'), await Template.exists('no-such-template')])
await box.kill()
op('run in a killed one', await refused(Error, () => box.commands.run('true')))
