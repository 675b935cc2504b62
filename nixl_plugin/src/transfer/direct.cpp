// SPDX-License-Identifier: Apache-2.0
#include "direct.h"
#include "support/log.h"
#include <algorithm>
#include <cstring>
#include <utility>

namespace kvbm_cxl {

namespace {

constexpr uintptr_t line_bytes = CXL_SHM_LINE_BYTES;
/// What a thread copies before it looks whether the transfer was cancelled.
constexpr uint64_t slice_bytes = 256 << 10;
/// Copies of a slice, at most: each costs some time, however short it is.
constexpr size_t slice_copies = 4096;

std::byte* destination(Way way, const Copy& copy) {
    return static_cast<std::byte*>(way == Way::out ? copy.memory : copy.pool);
}
std::byte* source(Way way, const Copy& copy) {
    return static_cast<std::byte*>(way == Way::out ? copy.pool : copy.memory);
}

bool continues(const Copy& one, const Copy& other) {
    return static_cast<std::byte*>(one.pool) + one.len_bytes == other.pool &&
           static_cast<std::byte*>(one.memory) + one.len_bytes == other.memory;
}

std::vector<Copy> joined(std::vector<Copy> copies) {
    std::vector<Copy> together;
    together.reserve(copies.size());
    for (const Copy& copy : copies) {
        if (copy.len_bytes == 0)
            continue;
        if (!together.empty() && continues(together.back(), copy))
            together.back().len_bytes += copy.len_bytes;
        else
            together.push_back(copy);
    }
    return together;
}

/// The first so many bytes of a copy, which it has not any more afterwards.
Copy split_off(Copy& copy, size_t len_bytes) {
    Copy first = {copy.pool, copy.memory, len_bytes};
    copy.pool = static_cast<std::byte*>(copy.pool) + len_bytes;
    copy.memory = static_cast<std::byte*>(copy.memory) + len_bytes;
    copy.len_bytes -= len_bytes;
    return first;
}

/// Whether a byte is both read and written by copies that are sorted by destination: then only the order in which they were given has a
/// meaning.
bool feeds_itself(Way way, const std::vector<Copy>& sorted) {
    if (way == Way::in || way == Way::out)
        return false;
    std::vector<Copy> by_source = sorted;
    auto before = [way](const Copy& one, const Copy& other) { return source(way, one) < source(way, other); };
    std::sort(by_source.begin(), by_source.end(), before);
    auto read = by_source.begin();
    for (const Copy& write : sorted) {
        while (read != by_source.end() && source(way, *read) + read->len_bytes <= destination(way, write))
            ++read;
        if (read != by_source.end() && source(way, *read) < destination(way, write) + write.len_bytes)
            return true;
    }
    return false;
}

/// Whether a copy writes what it reads. Pool and memory are one there only with Way::within.
bool is_onto_itself(const Copy& copy) {
    auto *to = static_cast<std::byte*>(copy.pool), *from = static_cast<std::byte*>(copy.memory);
    return to < from + copy.len_bytes && from < to + copy.len_bytes;
}

/// Makes such a copy within the pool, which no list of the pool's may have: through a buffer, and from the end on which nothing is written
/// that is still to be read.
int copy_onto_itself(const Copy& copy) {
    auto *to = static_cast<std::byte*>(copy.pool), *from = static_cast<std::byte*>(copy.memory);
    std::vector<std::byte> buffer(std::min<size_t>(copy.len_bytes, slice_bytes));
    for (size_t done = 0; done < copy.len_bytes;) {
        size_t len_bytes = std::min(copy.len_bytes - done, buffer.size());
        size_t at = to > from ? copy.len_bytes - done - len_bytes : done;
        if (int status = cxl_shm_copy_out(buffer.data(), from + at, len_bytes); status != CXL_SHM_OK)
            return status;
        if (int status = cxl_shm_copy_in(to + at, buffer.data(), len_bytes); status != CXL_SHM_OK)
            return status;
        done += len_bytes;
    }
    return CXL_SHM_OK;
}

const char* name_of(Way way) {
    switch (way) {
    case Way::in:
        return "writing to the pool";
    case Way::out:
        return "reading from the pool";
    case Way::within:
        return "copying within the pool";
    default:
        return "copying";
    }
}

} // namespace

CopyPlan::CopyPlan(Way way, std::vector<Copy> copies, uint64_t inline_bytes) : way_(way) {
    auto before = [way](const Copy& one, const Copy& other) { return destination(way, one) < destination(way, other); };
    std::vector<Copy> given = joined(std::move(copies));
    std::vector<Copy> sorted = given;
    if (!std::is_sorted(sorted.begin(), sorted.end(), before))
        std::stable_sort(sorted.begin(), sorted.end(), before);
    auto overlaps = [way](const Copy& one, const Copy& other) { return destination(way, one) + one.len_bytes > destination(way, other); };
    is_in_order_ = std::adjacent_find(sorted.begin(), sorted.end(), overlaps) != sorted.end() || feeds_itself(way, sorted);
    copies_ = is_in_order_ ? std::move(given) : joined(std::move(sorted));
    for (const Copy& copy : copies_)
        total_bytes_ += copy.len_bytes;
    if (total_bytes_ <= inline_bytes && copies_.size() <= slice_copies) {
        if (!copies_.empty())
            slices_.push_back({0, copies_.size()});
        return;
    }
    if (is_in_order_) {
        // One after the other, by one thread: there is nothing to divide.
        slices_ = {{0, copies_.size()}, {copies_.size(), 0}};
        return;
    }
    // No line of the destination is of two slices, because two threads that write parts of a line spoil it for each other.
    std::vector<Copy> cut;
    cut.reserve(copies_.size() + total_bytes_ / slice_bytes);
    uint64_t in_slice = 0;
    size_t first = 0;
    uintptr_t end_line = 0; // after the last line of the slice
    for (Copy rest : copies_) {
        while (rest.len_bytes > 0) {
            auto start = reinterpret_cast<uintptr_t>(destination(way, rest));
            bool is_full = in_slice >= slice_bytes || cut.size() - first >= slice_copies;
            if (is_full && start >= end_line) {
                slices_.push_back({first, cut.size() - first});
                first = cut.size();
                in_slice = 0;
            }
            uintptr_t limit = (start + slice_bytes) & ~(line_bytes - 1);
            size_t taken = std::min<size_t>(rest.len_bytes, is_full && start < end_line ? end_line - start : limit - start);
            cut.push_back(split_off(rest, taken));
            in_slice += taken;
            end_line = (start + taken + line_bytes - 1) & ~(line_bytes - 1);
        }
    }
    slices_.push_back({first, cut.size() - first});
    copies_ = std::move(cut);
}

nixl_status_t CopyPlan::make(const Copy* copies, size_t count) const noexcept {
    if (way_ == Way::memory) {
        for (size_t i = 0; i < count; i++)
            std::memmove(copies[i].pool, copies[i].memory, copies[i].len_bytes);
        return NIXL_SUCCESS;
    }
    try {
        int status = CXL_SHM_OK;
        if (count == 1 && way_ == Way::in)
            status = cxl_shm_copy_in(copies->pool, copies->memory, copies->len_bytes);
        else if (count == 1 && way_ == Way::out)
            status = cxl_shm_copy_out(copies->memory, copies->pool, copies->len_bytes);
        else if (count == 1 && is_onto_itself(*copies))
            status = copy_onto_itself(*copies);
        else
            status = cxl_shm_copy_list(static_cast<uint32_t>(way_), copies, count);
        if (status == CXL_SHM_OK) [[likely]]
            return NIXL_SUCCESS;
        return report(text("copy:", static_cast<uint32_t>(way_), ":", status), pool_failure(status, name_of(way_)));
    } catch (...) {
        return NIXL_ERR_BACKEND;
    }
}

nixl_status_t CopyPlan::make(const Slice& slice) const noexcept {
    const Copy* copies = copies_.data() + slice.first;
    if (!is_in_order_)
        return slice.count ? make(copies, slice.count) : NIXL_SUCCESS;
    for (size_t i = 0; i < slice.count; i++) {
        if (nixl_status_t status = make(copies + i, 1); status != NIXL_SUCCESS)
            return status;
    }
    return NIXL_SUCCESS;
}

nixl_status_t CopyPlan::make_all() const noexcept {
    for (const Slice& slice : slices_) {
        if (nixl_status_t status = make(slice); status != NIXL_SUCCESS)
            return status;
    }
    return NIXL_SUCCESS;
}

namespace {

void count(Counters& counters, const CopyPlan& plan) {
    switch (plan.way()) {
    case Way::in:
    case Way::within:
        counters.add(CXL_SHM_COUNT_NIXL_POOL_WRITTEN_BYTES, plan.total_bytes());
        break;
    case Way::out:
        counters.add(CXL_SHM_COUNT_NIXL_POOL_READ_BYTES, plan.total_bytes());
        break;
    case Way::memory:
        counters.add(CXL_SHM_COUNT_NIXL_LOCAL_BYTES, plan.total_bytes());
        break;
    }
}

/// A copy that may be wrong.
Status unlent() {
    return {NIXL_ERR_BACKEND, "CXL: the link to a peer ended while its memory was being copied"};
}

/// One post of a plan with several slices: threads claim them one by one.
class CopyJob : public Job {
    const std::shared_ptr<const CopyPlan> plan_;
    Counters& counters_; // of the engine, which exists until the end is reported
    Uses uses_;
    std::shared_ptr<Completion> whom_;
    std::atomic<size_t> next_{0};
    std::atomic<size_t> left_; // slices that are not done or skipped
    std::atomic<int> failure_{NIXL_SUCCESS};
    std::atomic<bool> has_ended_{false};

    void finish() noexcept {
        auto status = static_cast<nixl_status_t>(failure_.load(std::memory_order_relaxed));
        if (status == NIXL_SUCCESS && !uses_.were_lent())
            status = report("lent", unlent());
        if (status == NIXL_SUCCESS)
            count(counters_, *plan_);
        uses_.end();
        // The transfer has this job as long as it lives: let go of it.
        std::exchange(whom_, nullptr)->done(status);
        has_ended_.store(true, std::memory_order_release);
        has_ended_.notify_all();
    }

  public:
    CopyJob(std::shared_ptr<const CopyPlan> plan, Counters& counters, Uses uses, std::shared_ptr<Completion> whom)
        : plan_(std::move(plan)), counters_(counters), uses_(std::move(uses)), whom_(std::move(whom)), left_(plan_->slices().size()) {}

    /// Copies a slice; false if there is none left to begin with.
    bool run_slice() noexcept {
        size_t mine = next_.fetch_add(1, std::memory_order_relaxed);
        if (mine >= plan_->slices().size()) {
            next_.store(plan_->slices().size(), std::memory_order_relaxed); // so that it never wraps
            return false;
        }
        if (failure_.load(std::memory_order_relaxed) == NIXL_SUCCESS) {
            // Looked at before each as well: a thread that was stopped for long writes no more than it had begun with.
            nixl_status_t status = uses_.were_lent() ? plan_->make(plan_->slices()[mine]) : report("lent", unlent());
            int none = NIXL_SUCCESS;
            if (status != NIXL_SUCCESS)
                failure_.compare_exchange_strong(none, status, std::memory_order_relaxed);
        }
        // The copies of each thread are visible to the thread that learns that all are done.
        if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1)
            finish();
        return true;
    }

    void run() noexcept override {
        while (run_slice()) {
        }
    }

    void cancel() noexcept {
        int none = NIXL_SUCCESS;
        failure_.compare_exchange_strong(none, NIXL_ERR_CANCELED, std::memory_order_relaxed);
        run();
        has_ended_.wait(false, std::memory_order_acquire);
    }
};

class DirectPart : public Part {
    std::shared_ptr<Core> core_;
    std::shared_ptr<const CopyPlan> plan_;
    Uses uses_;
    std::shared_ptr<CopyJob> job_;

  public:
    DirectPart(std::shared_ptr<Core> core, CopyPlan plan, Uses uses)
        : core_(std::move(core)), plan_(std::make_shared<const CopyPlan>(std::move(plan))), uses_(std::move(uses)) {}

    nixl_status_t post(const std::shared_ptr<Completion>& whom) noexcept override {
        if (!uses_.begin())
            return report("deregistered", uses_.refusal());
        if (plan_->is_inline())
            return finish(plan_->make_all());
        try {
            job_ = std::make_shared<CopyJob>(plan_, core_->counters, uses_, whom);
        } catch (const std::exception&) {
            return finish(plan_->make_all());
        }
        if (!core_->workers.submit(job_, plan_->slices().size()))
            job_->run(); // ends it, and tells so, before this returns
        return NIXL_IN_PROG;
    }

    void poll() noexcept override {
        if (job_)
            job_->run_slice();
    }

    void cancel() noexcept override {
        if (job_)
            job_->cancel();
    }

    uint64_t estimate_us() const noexcept override {
        // 10 bytes per nanosecond, and 60 ns for each piece: the right order of magnitude on any machine.
        return plan_->total_bytes() / 10'000 + plan_->copies().size() * 60 / 1000;
    }

  private:
    nixl_status_t finish(nixl_status_t status) noexcept {
        if (status == NIXL_SUCCESS && !uses_.were_lent())
            status = report("lent", unlent());
        if (status == NIXL_SUCCESS)
            count(core_->counters, *plan_);
        uses_.end();
        return status;
    }
};

} // namespace

std::unique_ptr<Part> make_direct_part(std::shared_ptr<Core> core, CopyPlan plan, Uses uses) {
    return std::make_unique<DirectPart>(std::move(core), std::move(plan), std::move(uses));
}

} // namespace kvbm_cxl
