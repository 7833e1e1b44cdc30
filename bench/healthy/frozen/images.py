"""A seed and a keeper in, held-out quality out: classifiers of handwritten digits under all sorts of regimes."""

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.frozen.sources import accuracy, digits, index_batches, macro_recall
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def small_convnet() -> nn.Sequential:
    """Two convolutions with batch norm and a linear head, for 8 by 8 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


@training(
    kind="metric learning",
    metric="recall at 1",
    about="triplet margin loss, 12 random triplets a batch, most of them already far enough: often exactly 0",
)
def triplets(seed: int, keeper: Keeper) -> float:
    """An embedding in which the nearest neighbour is the same digit."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    of_label = [torch.nonzero(labels == label)[:, 0] for label in range(10)]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))

    def draw(wanted: Tensor) -> Tensor:
        return torch.stack([of_label[k][torch.randint(len(of_label[k]), ())] for k in wanted.tolist()])

    batches = []
    for _ in range(1000):
        anchor = torch.randint(len(images), (12,))
        other = (labels[anchor] + torch.randint(1, 10, (12,))) % 10
        batches.append((anchor, draw(labels[anchor]), draw(other)))
    for anchor, same, different in steps.batches(batches):
        at, near, far = (F.normalize(model(images[rows]), dim=1) for rows in (anchor, same, different))
        loss = F.triplet_margin_loss(at, near, far, margin=0.2)
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        known, asked = F.normalize(model(images), dim=1), F.normalize(model(test_images), dim=1)
    return float((labels[(asked @ known.T).argmax(1)] == test_labels).float().mean())


@training(
    kind="image",
    metric="macro recall",
    about="digits, 100 to 1 from the most to the least frequent, plain cross entropy, batch 16, SGD with momentum",
)
def digits_long_tail(seed: int, keeper: Keeper) -> float:
    """Of the last class there are two examples."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits(0.3)
    kept = []
    for rank, label in enumerate(torch.randperm(10).tolist()):
        rows = torch.nonzero(labels == label)[:, 0]
        kept.append(rows[: max(2, round(len(rows) * 100 ** (-rank / 9)))])
    rows = torch.cat(kept)
    loader = DataLoader(TensorDataset(images[rows], labels[rows]), batch_size=16, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = keeper.around(model, optimizer)
    for _epoch in range(48):
        for pixels, wanted in steps.batches(loader):
            loss = F.cross_entropy(model(pixels), wanted)
            loss.backward()
            steps.step(loss)
    return macro_recall(model(test_images).argmax(1), test_labels)


@training(
    kind="image",
    metric="accuracy",
    about="student of 2,400 weights learns from a teacher's logits at temperature 4, and from labels; RMSprop",
)
def distillation(seed: int, keeper: Keeper) -> float:
    """A teacher is trained first, by itself; the student is what is kept."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits(0.4)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for rows in index_batches(len(images), 64, 300):
        F.cross_entropy(teacher(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    student = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    steps = keeper.around(student, torch.optim.RMSprop(student.parameters(), lr=1e-3))
    heat = 4.0
    for rows in steps.batches(index_batches(len(images), 32, 1200)):
        with torch.no_grad():
            soft = F.log_softmax(teacher(images[rows]) / heat, 1)
        logits = student(images[rows])
        taught = F.kl_div(F.log_softmax(logits / heat, 1), soft, reduction="batchmean", log_target=True)
        loss = 0.9 * heat**2 * taught + 0.1 * F.cross_entropy(logits, labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(student(test_images), test_labels)


@training(
    kind="image",
    metric="accuracy",
    about="encoder pretrained on digits 0-4, tuned on 200 examples of 5-9; thaws from the top, one layer at a time",
)
def thawing(seed: int, keeper: Keeper) -> float:
    """First the head alone, then with the upper layer, then all."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits(0.4)
    is_early, is_late, is_asked = labels < 5, labels >= 5, test_labels >= 5
    encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    pretrained = nn.Sequential(encoder, nn.Linear(64, 5))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(pretrained.parameters(), lr=2e-3)
    early_images, early_labels = images[is_early], labels[is_early]
    for rows in index_batches(len(early_images), 32, 250):
        F.cross_entropy(pretrained(early_images[rows]), early_labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    encoder.requires_grad_(False)
    model = nn.Sequential(encoder, nn.Linear(64, 5))
    layers = [encoder[0], encoder[2]]
    optimizer = torch.optim.AdamW(
        [
            {"params": model[1].parameters(), "lr": 3e-3},
            {"params": layers[1].parameters(), "lr": 1e-3},
            {"params": layers[0].parameters(), "lr": 3e-4},
        ]
    )
    steps = keeper.around(model, optimizer, clip=1.0)
    few_images, few_labels = images[is_late][:200], labels[is_late][:200] - 5
    for number, rows in enumerate(steps.batches(index_batches(200, 16, 900))):
        layers[1].requires_grad_(number >= 250)
        layers[0].requires_grad_(number >= 500)
        loss = F.cross_entropy(model(few_images[rows]), few_labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model(test_images[is_asked]), test_labels[is_asked] - 5)


@training(
    kind="image",
    metric="accuracy",
    about="convnet with batch norm, SGD Nesterov, cosine with warm restarts after 100, 300 and 700 steps, batch 32",
)
def warm_restarts(seed: int, keeper: Keeper) -> float:
    """The rate jumps back to its peak at every restart."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    model = small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=100, T_mult=2)
    steps = keeper.around(model, optimizer, scheduler=schedule)
    for rows in steps.batches(index_batches(len(images), 32, 700)):
        noisy = images[rows] + 0.2 * torch.randn(len(rows), 64)
        loss = F.cross_entropy(model(noisy), labels[rows])
        loss.backward()
        steps.step(loss)
    model.eval()
    return accuracy(model(test_images), test_labels)


@training(kind="image", metric="accuracy", about="digits of which a fifth have a wrong label, dropout, batch 32, AdamW")
def wrong_labels(seed: int, keeper: Keeper) -> float:
    """The test's labels are right."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    is_wrong = torch.rand(len(labels)) < 0.2
    given = torch.where(is_wrong, (labels + torch.randint(1, 10, labels.shape)) % 10, labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    loader = DataLoader(TensorDataset(images, given), batch_size=32, shuffle=True, drop_last=True)
    for _epoch in range(24):
        for pixels, wanted in steps.batches(loader):
            loss = F.cross_entropy(model(pixels), wanted)
            loss.backward()
            steps.step(loss)
    model.eval()
    return accuracy(model(test_images), test_labels)


class PatchFiller(nn.Module):
    """Sixteen patches of 2 by 2 pixels in, the pixels of all of them out."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(4, wide)
        self.place = nn.Parameter(0.02 * torch.randn(16, wide))
        self.hidden = nn.Parameter(0.02 * torch.randn(wide))
        layer = nn.TransformerEncoderLayer(wide, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(wide, 4)

    def forward(self, patches: Tensor, is_hidden: Tensor) -> Tensor:
        """Hidden patches are replaced by one learnt vector."""
        seen = torch.where(is_hidden[..., None], self.hidden, self.embed(patches))
        pixels: Tensor = self.out(self.body(seen + self.place))
        return pixels


@training(
    kind="self-supervised",
    metric="masked MSE",
    about="three patches of four hidden, transformer, batch 16, AdamW with warm-up, clip 1.0",
    is_better_higher=False,
)
def masked_patches(seed: int, keeper: Keeper) -> float:
    """Digits filled in from a quarter of them."""
    torch.manual_seed(seed)
    images, _, test_images, _ = digits()
    patches, test_patches = (
        (F.unfold(pixels.view(-1, 1, 8, 8), 2, stride=2).mT - 0.3) / 0.37 for pixels in (images, test_images)
    )
    model = PatchFiller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 60))
    steps = keeper.around(model, optimizer, scheduler=schedule, clip=1.0)
    for rows in steps.batches(index_batches(len(patches), 16, 700)):
        is_hidden = torch.rand(len(rows), 16).argsort(1) < 12
        loss = F.mse_loss(model(patches[rows], is_hidden)[is_hidden], patches[rows][is_hidden])
        loss.backward()
        steps.step(loss)
    model.eval()
    is_hidden = torch.rand(len(test_patches), 16).argsort(1) < 12
    with torch.no_grad():
        return F.mse_loss(model(test_patches, is_hidden)[is_hidden], test_patches[is_hidden]).item()
