"""The plain training loop. Every strategy runs under it, unchanged."""


def train(module, optimizer, batches) -> list[float]:
    """Trains one step on each batch; returns the loss of each, before its update."""
    losses = []
    for batch in batches:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
