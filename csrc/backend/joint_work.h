// Several operations as one Work.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace pg_sdma {

class JointWork : public c10d::Work {
 public:
  // `works`: none null.
  explicit JointWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](auto& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isSuccess(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool completed = true;
    for (auto& work : works_) completed = work->wait(timeout) && completed;
    return completed;
  }

  void synchronize() override {
    for (auto& work : works_) work->synchronize();
  }

 protected:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace pg_sdma
