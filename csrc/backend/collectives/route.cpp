#include "backend/collectives/route.h"

namespace pg_sdma {
namespace {

// pg_sdma.tuning.LARGEST: the bound of an operation that never goes direct.
constexpr uint64_t kNever = INT64_MAX;

std::string below(const std::string& what, uint64_t bound) {
  if (bound == kNever) return "the tuning file leaves it to the inner at every size";
  return what + std::to_string(bound) + " bytes (PG_SDMA_MIN_BYTES)";
}

}  // namespace

std::string static_refusal(const CallFacts& facts, const Policy& policy) {
  if (!policy.refusal.empty()) return policy.refusal;
  if (!facts.unsupported.empty()) return facts.unsupported;
  if (facts.sums && !policy.no_sums.empty()) return policy.no_sums;
  if (facts.capturing) return "graph capture";
  if (facts.coalescing) return "inside a coalescing block";
  if (!facts.even) return "uneven shards";
  const uint64_t least = facts.sums ? policy.min_sum_bytes : policy.min_bytes;
  if (facts.total_bytes < least) return below("below ", least);
  if (facts.tensors > 1 && facts.total_bytes / facts.tensors < policy.min_mean_bytes) {
    return below("the mean of its tensors is below ", policy.min_mean_bytes);
  }
  return "";
}

}  // namespace pg_sdma
