#include "backend/collectives/host_reducer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace pg_sdma {
namespace {

// At so many elements ATen does not yet split an operation among threads: every core has a rank to
// serve already. And they still lie in the core's own cache when they are summed.
constexpr size_t kMostElements = 32768;

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

at::ScalarType precision_of_sum(at::ScalarType type) { return is_half(type) ? at::kFloat : type; }

at::Tensor elements(const void* data, int64_t count, at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), {count}, type);
}

}  // namespace

bool HostReducer::takes(at::ScalarType type) {
  return is_half(type) || type == at::kFloat || type == at::kDouble;
}

HostReducer::HostReducer(Reduction reduction, int rank, int world,
                         std::vector<at::ScalarType> types, size_t slice_bytes, size_t most_bytes)
    : reduction_(reduction), rank_(rank), world_(world), types_(std::move(types)) {
  const bool widens = std::any_of(types_.begin(), types_.end(), is_half);
  size_t smallest = sizeof(double);
  for (const at::ScalarType type : types_) smallest = std::min(smallest, c10::elementSize(type));
  // For each byte of a slice: one landed from every peer, and what the sum takes.
  const size_t peers = static_cast<size_t>(world_) - 1;
  const size_t per_byte = peers + (widens ? 4 : 1);
  room_ = std::min({most_bytes / per_byte, kMostElements * smallest, slice_bytes});
  room_ = std::max(room_ / kMostElement * kMostElement, kMostElement);
  memory_ = at::empty({static_cast<int64_t>(room_ * per_byte)}, at::kByte);
  sum_ = static_cast<std::byte*>(memory_.mutable_data_ptr()) + room_ * peers;
  widened_ = sum_ + 2 * room_;
}

Launch HostReducer::launch(const Share& share, size_t offset, size_t bytes, int which, size_t at) {
  Launch launch;
  launch.call = [this, &share, offset, bytes, which, at] {
    std::vector<const void*> slices(static_cast<size_t>(world_));
    for (int r = 0; r < world_; ++r) {
      const void* first = r == rank_ ? share.slices[static_cast<size_t>(r)] : landing(which, r);
      slices[static_cast<size_t>(r)] =
          static_cast<const std::byte*>(first) + (r == rank_ ? offset : at);
    }
    reduce(share, offset, bytes, slices);
  };
  return launch;
}

void* HostReducer::landing(int, int peer) {
  const auto row = static_cast<size_t>(peer < rank_ ? peer : peer - 1);
  return static_cast<std::byte*>(memory_.mutable_data_ptr()) + row * room_;
}

void HostReducer::reduce(const Share& share, size_t offset, size_t bytes,
                         const std::vector<const void*>& slices) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = types_[share.tensor];
  const auto count = static_cast<int64_t>(bytes / c10::elementSize(type));
  at::Tensor sum = elements(sum_, count, precision_of_sum(type));
  sum.copy_(elements(slices[0], count, type));
  for (size_t rank = 1; rank < slices.size(); ++rank) {
    at::Tensor slice = elements(slices[rank], count, type);
    // Mixed types would make ATen allocate what it widens into.
    if (is_half(type)) slice = elements(widened_, count, at::kFloat).copy_(slice);
    sum.add_(slice);
  }
  if (reduction_.kind == Reduction::Kind::kAverage) sum.div_(world_);
  if (reduction_.kind == Reduction::Kind::kPremultiplied) sum.mul_(reduction_.factor);
  // To nearest. Another rounding would go here, keyed by the tensor and the elements' numbers from
  // `offset` on.
  elements(static_cast<std::byte*>(share.output) + offset, count, type).copy_(sum);
}

}  // namespace pg_sdma
