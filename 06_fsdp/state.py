"""The full state of a strategy that trains flat shards: put together for a checkpoint, and cut again."""

from contextlib import contextmanager

from common.strategy import Strategy


class StateInShards(Strategy):
    """`flats` holds all parameters, `trained` those that `optimizer` steps the shards of (by_hand.py)."""

    @contextmanager
    def whole(self):
        """Inside, parameters and `optimizer` are as one process would hold them, in float32; collective.

        Yields a vector for each flat, of which the parameters are views, and the optimizer of the shards.
        """
        sharded, self.optimizer = self.optimizer, self.make_optimizer(self.model.parameters())
        self.model.zero_grad()  # set_state_dict gives a new optimizer its state only where there is no gradient
        vectors = [flat.whole(flat.shard) for flat in self.flats]
        for flat, vector in zip(self.flats, vectors, strict=True):
            flat.show(flat.views(vector))
        copy_hyperparameters(sharded, self.optimizer)
        yield vectors, sharded
        copy_hyperparameters(self.optimizer, sharded)
        for flat in self.flats:
            flat.show(flat.views_of_vector)
        self.optimizer = sharded

    def full_state(self):
        with self.whole() as (_, sharded):
            for flat in self.trained:
                for key, value in sharded.state[flat.shard].items():
                    pieces = flat.views(flat.whole(value)) if value.dim() else [value.clone() for _ in flat.parameters]
                    for parameter, piece in zip(flat.parameters, pieces, strict=True):
                        self.optimizer.state[parameter][key] = piece
            return super().full_state()

    def load_full_state(self, state):
        with self.whole() as (vectors, sharded):
            super().load_full_state(state)
            for flat, vector in zip(self.flats, vectors, strict=True):
                flat.shard.data.copy_(flat.own(vector))
            for flat in self.trained:
                for key, value in self.optimizer.state[flat.parameters[0]].items():
                    vector = value.new_zeros(len(flat.vector))
                    for parameter, view in zip(flat.parameters, flat.views(vector), strict=True):
                        view.copy_(self.optimizer.state[parameter][key])
                    sharded.state[flat.shard][key] = flat.own(vector).clone() if value.dim() else value
        self.spread(self.flats)


def copy_hyperparameters(source, target):
    target.param_groups[0].update({key: value for key, value in source.param_groups[0].items() if key != "params"})
