// Feature maps and self-saliency of a few rows.
#pragma once

#include "cpu/common/gemm.h"
#include "hybrid_attention.h"

namespace
{

using still_cpu::hybrid::FeatureMap;
using still_cpu::hybrid::Layer;
using still_cpu::hybrid::Saliency;

constexpr float kFloor = 1e-12f;
constexpr float kReleasedEpsilon = 1e-8f;

// softmax(sign * x) with the floor.
inline void floored_softmax(float const* x, int n, float sign, float* out)
{
    for (int i = 0; i < n; ++i)
        out[i] = sign * x[i];
    float const share = 1 / exponentiate(out, n, largest(out, n));
    for (int i = 0; i < n; ++i)
    {
        float const p = out[i] * share;
        out[i] = p > kFloor ? p : kFloor;
    }
}

// phi [F] from a row's projection [P], which is overwritten, and the row's norm.
inline void map_row(Layer const& layer, float* direction, float norm, float* phi)
{
    int const n = layer.rows;
    switch (layer.map)
    {
    case FeatureMap::kNormPreserved:
    {
        float const own = __builtin_sqrtf(dot(direction, direction, n));
        scale(direction, n, norm / (own > kFloor ? own : kFloor));
        floored_softmax(direction, n, 1, phi);
        floored_softmax(direction, n, -1, phi + n);
        break;
    }
    case FeatureMap::kSoftmaxBothSigns:
        floored_softmax(direction, n, 1, phi);
        floored_softmax(direction, n, -1, phi + n);
        break;
    case FeatureMap::kSoftmax: floored_softmax(direction, n, 1, phi); break;
    case FeatureMap::kRelu:
        for (int i = 0; i < n; ++i)
            phi[i] = direction[i] > kFloor ? direction[i] : kFloor;
        break;
    case FeatureMap::kEluPlusOne:
        for (int i = 0; i < n; ++i)
        {
            float const y = direction[i] > 0 ? direction[i] + 1 : exponential(direction[i]);
            phi[i] = y > kFloor ? y : kFloor;
        }
        break;
    case FeatureMap::kIdentity: std::memcpy(phi, direction, sizeof(float) * static_cast<unsigned>(n)); break;
    }
}

// Score of a token from the logits of its window: `own` and the `count` tokens before it, the last of which has slot own_slot - 1.
inline float saliency(Layer const& layer, float const* others, int count, float own, int own_slot)
{
    if (count == 0)
        return -kMinusInfinity;
    float const top = largest(others, count);
    if (layer.saliency == Saliency::kMargin)
        return own - top - __builtin_logf(sum_of_exponentials(others, count, top));
    // The released training code's divergence over all C slots; slots without a token have probability 0. Slot C-1 of Q holds a constant.
    float const eps = kReleasedEpsilon, c = static_cast<float>(layer.chunk);
    float const norm_p = 1 + c * eps, norm_q = 1 + c * eps + 1 / c, constant = 1 / c + eps;
    float const top_p = top > own ? top : own;
    float const own_weight = exponential(own - top_p);
    float const total_q = sum_of_exponentials(others, count, top);
    float const total_p = sum_of_exponentials(others, count, top_p) + own_weight;
    float score = 0;
    for (int slot = 0; slot < layer.chunk; ++slot)
    {
        int const back = (own_slot - slot + layer.chunk) % layer.chunk; // 0 = the token itself
        float p = 0, q = 0;
        if (back == 0)
            p = own_weight / total_p;
        else if (back <= count)
        {
            p = exponential(others[count - back] - top_p) / total_p;
            q = exponential(others[count - back] - top) / total_q;
        }
        p = (p + eps) / norm_p;
        q = slot == layer.chunk - 1 ? constant : (q + eps) / norm_q;
        score += p * __builtin_logf(p / (q + eps));
    }
    return score;
}

} // namespace
