"""The rules in NumPy, written from the papers alone; see ``around`` for the contract."""

import numpy as np


def each(function):
    """A reference of every parameter by itself."""
    return lambda w, g, s, t: {k: function(w[k], g[k]) for k in g}


def norm(x):
    return np.sqrt(np.sum(np.abs(x) ** 2))


def shortened(g, longest):
    return g if norm(g) <= longest else g * (longest / norm(g))


def clip_by_value(limit):
    def clip(w, g):
        size = np.abs(g)
        return np.where(size > limit, g / np.where(size == 0, 1, size) * limit, g)

    return each(clip)


def clip_by_norm(longest):
    return each(lambda w, g: shortened(g, longest))


def clip_by_global_norm(longest):
    def clip(w, g, s, t):
        size = np.sqrt(sum(norm(x) ** 2 for x in g.values()))
        return {k: x * min(1, longest / size) for k, x in g.items()}

    return clip


def adaptive_clip(ratio, epsilon):
    def clip(w, g):
        if w.ndim < 2:
            return shortened(g, ratio * max(norm(w), epsilon))
        units = [shortened(g[..., i], ratio * max(norm(w[..., i]), epsilon)) for i in range(w.shape[-1])]
        return np.stack(units, axis=-1)

    return each(clip)


def l1(rate):
    return each(lambda w, g: g + rate * w / np.where(w == 0, 1, np.abs(w)))


def l2(rate):
    return each(lambda w, g: g + rate * w)


def centralize():
    def centred(w, g):
        return g if g.ndim < 2 else g - g.mean(axis=tuple(range(g.ndim - 1)))

    return each(centred)


def decay(rate, independent=False):
    def decayed(w, new, g, s, t, rates):
        return {k: new[k] - (1 if independent else rates[k]) * rate * w[k] for k in w}

    return decayed


def ema(rate, ramp=False):
    def averaged(w, new, g, s, t, rates):
        share = min(rate, t / (9 + t)) if ramp else rate
        old = s.get("average", w)
        s["average"] = {k: share * old[k] + (1 - share) * new[k] for k in w}
        return new

    return averaged


def mean_of_every(begin, every):
    """The mean of the parameters after the steps begin + every, begin + 2 every, and so on."""
    seen = []

    def averaged(w, new, g, s, t, rates):
        if t > begin and (t - begin) % every == 0:
            seen.append(new)
        if t <= begin:
            s["average"] = new
        elif seen:
            s["average"] = {k: np.mean([one[k] for one in seen], axis=0) for k in w}
        return new

    return averaged


def lookahead(share, every):
    def back(w, new, g, s, t, rates):
        slow = s.setdefault("slow", w)
        if t % every:
            return new
        s["slow"] = {k: slow[k] + share * (new[k] - slow[k]) for k in w}
        return s["slow"]

    return back


def cautious(epsilon):
    def masked(w, new, g, s, t, rates):
        found = {}
        for k in w:
            way = w[k] - new[k]
            mask = (way * np.conj(g[k])).real > 0
            found[k] = w[k] - way * mask / max(mask.mean(), epsilon)
        return found

    return masked
