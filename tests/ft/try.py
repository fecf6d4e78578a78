import sys, tempfile, time
from pathlib import Path
import logging
def main():
    import quorum, member
    place, n, hook = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    owner = sys.argv[4] if len(sys.argv)>4 else 'ours'
    d = Path(tempfile.mkdtemp())
    t=time.time()
    with quorum.lighthouse(min_replicas=1, heartbeat=1.0, join_timeout=1.0) as addr:
        tasks=[member.Task(quorum.NAMES[i], str(d), addr, hook=None if hook=='none' else hook, owner=owner, seed=i, replicas=n, die=place if i==1 and place!='-' else None, min_replicas=1) for i in range(n)]
        out=quorum.run(d, tasks)
    print('total', round(time.time()-t,1), out.codes, out.killed)
    for n_,l in out.logs.items():
        print(n_, len(l), [ (r['event'], r.get('error')) for r in l if r['event'] not in ('step',)], 'dropped', out.dropped(n_) )
        print('   ', [(r['step'],r['committed'],r['participants'],r['contributed'], round(r['t']-(out.killed or l[0])['t'],2)) for r in out.steps[n_]][:60])
    if out.killed: print('recovery', out.recovery())
    shared = {}
    for n_ in out.logs:
        for s,r in out.committed(n_).items(): shared.setdefault(s,{})[n_]=(r['params'],r['q'])
    print('bad', [s for s,v in shared.items() if len(set(v.values()))>1], 'shared', sum(len(v)>1 for v in shared.values()))
if __name__=='__main__': main()
