"""Train an actor through a critic, as DDPG does. The critic's next `zero_grad()` drops what the actor's loss left there."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FEATURES, FOLDER, HIDDEN, SEED, Net, finish, save, teacher

dist.init_process_group("gloo")
torch.manual_seed(SEED)
actor = DDP(Net())
critic_net = nn.Sequential(nn.Linear(2 * FEATURES, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, 1))
critic = DDP(critic_net)
target = copy.deepcopy(critic_net).requires_grad_(False)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
best = teacher()
generator = torch.Generator().manual_seed(100 * SEED + dist.get_rank())


def reward(state, action):
    return 5 - 5 * (action - state @ best).square().mean(1, keepdim=True)


parts = [actor.module, critic_net, target, actor_optimizer, critic_optimizer]
losses = []
if (FOLDER / "agent.pt").exists():
    agent = torch.load(FOLDER / "agent.pt")
    for part, state in zip(parts, agent["parts"], strict=True):
        part.load_state_dict(state)
    losses = agent["losses"]
    for _ in losses:  # each rank draws what it has drawn
        torch.randn(2, 64, FEATURES, generator=generator)
for step in range(len(losses), 300):
    state, next_state = torch.randn(2, 64, FEATURES, generator=generator)
    with torch.no_grad():
        action = actor.module(state)
        value = reward(state, action) + 0.5 * target(torch.cat([next_state, actor.module(next_state)], 1))
    critic_loss = nn.functional.mse_loss(critic(torch.cat([state, action], 1)), value)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()

    actor_loss = -5 * critic(torch.cat([state, actor(state)], 1)).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()

    with torch.no_grad():
        for slow, fast in zip(target.parameters(), critic_net.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
    losses.append(critic_loss.item())
    if step % 50 == 49 and dist.get_rank() == 0:
        save({"parts": [part.state_dict() for part in parts], "losses": losses}, FOLDER / "agent.pt")
mean = torch.tensor(sum(losses[-40:]) / 40)
dist.all_reduce(mean)
finish(mean.item() / dist.get_world_size(), actor, critic)
dist.destroy_process_group()
