"""The calls of Horovod's example of this name, in its order, with a small model; several backward passes per step."""

import math
import os

import horovod.torch as hvd  # the test swaps this line
import torch
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed
from torch import nn


def main(args, seen):
    def train(epoch):
        model.train()
        train_sampler.set_epoch(epoch)
        train_loss = Metric("train_loss")
        train_accuracy = Metric("train_accuracy")
        for batch_idx, (data, target) in enumerate(train_loader):
            adjust_learning_rate(epoch, batch_idx)
            optimizer.zero_grad()
            for i in range(0, len(data), args.batch_size):
                data_batch = data[i : i + args.batch_size]
                target_batch = target[i : i + args.batch_size]
                output = model(data_batch)
                train_accuracy.update(accuracy(output, target_batch))
                loss = F.cross_entropy(output, target_batch)
                train_loss.update(loss)
                loss.div_(math.ceil(float(len(data)) / args.batch_size))
                loss.backward()
            optimizer.step()
        return train_loss.avg.item(), train_accuracy.avg.item()

    def adjust_learning_rate(epoch, batch_idx):
        if epoch < args.warmup_epochs:
            epoch += float(batch_idx + 1) / len(train_loader)
            lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
        else:
            lr_adj = 1.0
        for param_group in optimizer.param_groups:
            param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj

    def accuracy(output, target):
        pred = output.max(1, keepdim=True)[1]
        return pred.eq(target.view_as(pred)).cpu().float().mean()

    def save_checkpoint(epoch):
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))

    class Metric:
        def __init__(self, name):
            self.name = name
            self.sum = torch.tensor(0.0)
            self.n = torch.tensor(0.0)

        def update(self, val):
            self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
            self.n += 1

        @property
        def avg(self):
            return self.sum / self.n

    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    hvd.init()
    torch.manual_seed(args.seed)
    resume_from_epoch = 0
    if hvd.rank() == 0:  # the checkpoints are on this rank's disk
        for try_epoch in range(args.epochs, 0, -1):
            if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
                resume_from_epoch = try_epoch
                break
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

    train_dataset, _ = args.datasets
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)

    model = nn.Sequential(nn.Flatten(), nn.Linear(49, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 7))
    lr_scaler = args.batches_per_allreduce * hvd.size()
    optimizer = optim.SGD(
        model.parameters(), lr=(args.base_lr * lr_scaler), momentum=args.momentum, weight_decay=args.wd
    )
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    optimizer.register_step_pre_hook(lambda *_: seen(model))
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    averages = None
    for epoch in range(resume_from_epoch, args.epochs):
        averages = train(epoch)
        save_checkpoint(epoch)
    return model, averages
