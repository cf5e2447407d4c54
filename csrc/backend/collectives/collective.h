// One call of a collective that may go direct, checked and taken apart: what the route looks at,
// what a transport carries, and how the inner would do the same.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/collectives/route.h"
#include "transport/call.h"

namespace pg_sdma {

class DirectTransport;
struct Operation;

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The whole of a call is in its tensors: a Collective keeps them alive until it is dropped, and the
// addresses in `call` point into them.
class Collective : public std::enable_shared_from_this<Collective> {
 public:
  virtual ~Collective() = default;

  Call call;
  CallFacts facts;
  const bool async;
  const c10d::OpType type;
  uint64_t record = 0;  // the flight recorder's
  std::string inner;    // by name: whose users the results are for

  virtual const char* name() const = 0;  // the operation's, as users know it
  int rank() const { return rank_; }
  const Tensors& inputs() const { return inputs_; }
  const Tensors& outputs() const { return outputs_; }
  // Whether the call has tensors, and so a device.
  bool known() const { return !inputs_.empty() && inputs_[0].defined(); }
  // Of the tensors; the CPU when the call has none.
  at::Device device() const { return known() ? inputs_[0].device() : at::Device(at::kCPU); }

  // The same call on the inner, as the user made it.
  virtual WorkPtr on_inner(c10d::Backend& inner) = 0;

  // What a future of the call holds, whichever way it goes: what the inner's does. On a CPU called
  // at any time; on a device once, on a stream that is ordered behind the call. A list of tensors,
  // but of gloo's coalesced calls on a CPU. Keeps nothing but outputs alive.
  using Results = std::function<c10::IValue()>;
  virtual Results results() const {
    return [outputs = outputs_] { return c10::IValue(outputs); };
  }

  // What takes long, or Python, and is to be done before a call holds up others. Does not throw:
  // see call.unable.
  virtual void get_ready() {}

  // Fills in what `call` says of the tensors, now that what was issued before has ended. What
  // cannot be read or written as it lies, here or by peers, goes through a stand-in. Does not
  // throw: see call.invalid.
  void lay_out();

  // The rest is for after lay_out().

  // Tensors that make up the call; what is longer than kMaxTensors is carried in parts.
  virtual size_t tensors() const = 0;
  // Tensors [first, last) as a call of their own.
  virtual Call part(size_t first, size_t last) const = 0;
  // Carries a part that was called direct.
  virtual void run(DirectTransport& transport, const Call& part, const Operation& operation) = 0;
  // Tensors [first, last) on the inner, where a part was called late.
  virtual std::vector<WorkPtr> part_on_inner(c10d::Backend& inner, size_t first, size_t last) = 0;
  // An asynchronous call on a device is waited for: `stream`, on which the call's tensors may next
  // be used, is ordered behind it.
  virtual void followed_by(c10::Stream stream) {}
  // On a CPU, once all parts have ended: writes what is not yet where the user wanted it.
  virtual void finish();

 protected:
  Collective(c10d::OpType type, int rank, int world, Tensors outputs, Tensors inputs, bool async)
      : async(async),
        type(type),
        rank_(rank),
        world_(world),
        outputs_(std::move(outputs)),
        inputs_(std::move(inputs)) {}

  // What lay_out() does, and may throw.
  virtual void add_tensors() = 0;
  // Takes back what add_tensors() did before it threw.
  virtual void forget_tensors() = 0;

  // What is wrong with the tensors by themselves; empty when nothing is. `who` begins the message.
  std::string check_tensors(const std::string& who) const;
  // Where the contents of `output` are to be written.
  void* landing(const at::Tensor& output);

  const int rank_;
  const int world_;
  Tensors outputs_;  // not const: c10d takes them by reference
  Tensors inputs_;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> stand_ins_;  // user's output, contiguous stand-in
};

}  // namespace pg_sdma
