// SPDX-License-Identifier: Apache-2.0
#include "copy.h"
#include "../log.h"
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

namespace kvbm_cxl::cuda {

namespace {

/// Copies that are handed to the driver at a time.
constexpr size_t most_of_a_batch = 4096;
constexpr Result error_not_supported = 801;

DeviceAddress address_of(const void* host) {
    return reinterpret_cast<DeviceAddress>(host);
}

/// Pieces that follow one another on both sides, joined.
void join_neighbours(std::vector<DevicePiece>& pieces) {
    size_t kept = 0;
    for (const DevicePiece& piece : pieces) {
        if (piece.len_bytes == 0)
            continue;
        DevicePiece* last = kept ? &pieces[kept - 1] : nullptr;
        if (last && last->device + last->len_bytes == piece.device && last->host + last->len_bytes == piece.host)
            last->len_bytes += piece.len_bytes;
        else
            pieces[kept++] = piece;
    }
    pieces.resize(kept);
}

/// The pieces, none of them longer than `most(piece)` allows from its start on.
template <class Most> std::vector<DevicePiece> cut(const std::vector<DevicePiece>& pieces, Most most) {
    std::vector<DevicePiece> parts;
    parts.reserve(pieces.size());
    for (DevicePiece piece : pieces) {
        while (piece.len_bytes > 0) {
            size_t len = std::min<size_t>(piece.len_bytes, most(piece));
            parts.push_back({piece.device, piece.host, len});
            piece = {piece.device + len, piece.host + len, piece.len_bytes - len};
        }
    }
    return parts;
}

} // namespace

class Copy::Work {
    /// What the device was given together, and the event behind it.
    struct Step {
        Event event = nullptr;
        std::byte* buffer = nullptr; // the pieces lie in it one after the other; null = the device reaches the memory itself
        size_t first = 0, end = 0;   // of the pieces
        bool is_under_way = false;
    };

    std::shared_ptr<Device> device_;
    std::shared_ptr<PinnedPool> pool_;
    Direction direction_;
    std::vector<DevicePiece> pieces_;
    std::shared_ptr<void> hold_;
    bool is_direct_ = false;
    Stream stream_ = nullptr;
    std::array<Step, 2> steps_;
    size_t next_ = 0; // piece that no step has yet
    bool is_cancelled_ = false;
    bool has_ended_ = false;
    Status result_;
    mutable std::mutex mutex_;

    const Functions& driver() const { return *device_->driver(); }
    bool is_pool(const DevicePiece& piece) const { return pool_ && pool_->contains(piece.host); }
    void fail(Status failure) {
        if (result_.ok())
            result_ = std::move(failure);
    }
    Status of_pool(int status, std::string_view what, const DevicePiece& piece) const {
        return pool_failure(status, text(what, " ", piece.len_bytes, " bytes of the pool at ", hex(address_of(piece.host))));
    }

    bool invalidate_all();
    void flush_all();
    bool fill(Step& step);
    bool empty(const Step& step);
    bool submit(const Step& step);
    void begin(Step& step);
    bool has_finished(Step& step);
    void advance();

  public:
    Work(std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool, Direction direction, std::vector<DevicePiece> pieces)
        : device_(std::move(device)), pool_(std::move(pool)), direction_(direction), pieces_(std::move(pieces)) {}
    ~Work();

    Status prepare(Way way);
    void start(std::shared_ptr<void> hold);
    nixl_status_t poll();
    void cancel();
    bool has_ended() const;
    Status result() const;
};

/// Whether each piece can be used at all, how they are copied, and what is needed for that.
Status Copy::Work::prepare(Way way) {
    for (const DevicePiece& piece : pieces_) {
        if (piece.len_bytes != 0 && (!piece.host || piece.device > UINT64_MAX - piece.len_bytes))
            return {NIXL_ERR_INVALID_PARAM, text("CXL: ", piece.len_bytes, " bytes at ", hex(piece.device), " of GPU ", device_->ordinal(),
                                                 " and at ", hex(address_of(piece.host)), " of the host cannot be copied")};
    }
    join_neighbours(pieces_);
    Current current(device_->driver(), device_->context());
    if (current.result() != success)
        return device_->failure(current.result(), "making its context current");
    if (Status found = device_->stream(stream_); !found.ok())
        return found;
    is_direct_ = way == Way::any && std::all_of(pieces_.begin(), pieces_.end(), [&](const DevicePiece& piece) {
                     return is_pool(piece) && pool_->pin(piece.host, piece.len_bytes);
                 });
    if (is_direct_)
        pieces_ = cut(pieces_, [&](const DevicePiece& piece) { return pool_->until_border(piece.host); });
    else
        pieces_ = cut(pieces_, [](const DevicePiece&) { return bounce_bytes; });
    for (Step& step : steps_) {
        if (Status taken = device_->take_event(step.event); !taken.ok())
            return taken;
        void* buffer = nullptr;
        if (!is_direct_) {
            if (Status taken = device_->take_buffer(buffer); !taken.ok())
                return taken;
        }
        step.buffer = static_cast<std::byte*>(buffer);
    }
    return {};
}

Copy::Work::~Work() {
    Current current(device_->driver(), device_->context());
    for (Step& step : steps_)
        device_->give_back(step.event, step.buffer);
}

void Copy::Work::start(std::shared_ptr<void> hold) {
    std::lock_guard lock(mutex_);
    hold_ = std::move(hold);
    Current current(device_->driver(), device_->context());
    if (current.result() != success)
        fail(device_->failure(current.result(), "making its context current"));
    else if (is_direct_)
        (void)invalidate_all();
    advance();
}

bool Copy::Work::invalidate_all() {
    for (const DevicePiece& piece : pieces_) {
        if (int status = cxl_shm_invalidate(piece.host, piece.len_bytes); status != CXL_SHM_OK) {
            fail(of_pool(status, "invalidating", piece));
            return false;
        }
    }
    return true;
}

void Copy::Work::flush_all() {
    for (const DevicePiece& piece : pieces_) {
        if (int status = cxl_shm_flush(piece.host, piece.len_bytes); status != CXL_SHM_OK)
            fail(of_pool(status, "flushing", piece));
    }
}

/// Copies a step's pieces from the host's memory to its buffer.
bool Copy::Work::fill(Step& step) {
    std::byte* at = step.buffer;
    for (size_t index = step.first; index < step.end; at += pieces_[index++].len_bytes) {
        const DevicePiece& piece = pieces_[index];
        if (!is_pool(piece))
            std::memcpy(at, piece.host, piece.len_bytes);
        else if (int status = cxl_shm_copy_out(at, piece.host, piece.len_bytes); status != CXL_SHM_OK)
            return fail(of_pool(status, "reading", piece)), false;
    }
    return true;
}

/// Copies a step's pieces from its buffer to the host's memory.
bool Copy::Work::empty(const Step& step) {
    const std::byte* at = step.buffer;
    for (size_t index = step.first; index < step.end; at += pieces_[index++].len_bytes) {
        const DevicePiece& piece = pieces_[index];
        if (!is_pool(piece))
            std::memcpy(piece.host, at, piece.len_bytes);
        else if (int status = cxl_shm_copy_in(piece.host, at, piece.len_bytes); status != CXL_SHM_OK)
            return fail(of_pool(status, "writing", piece)), false;
    }
    return true;
}

/// Gives a step's copies to the device.
bool Copy::Work::submit(const Step& step) {
    std::vector<DeviceAddress> destinations, sources;
    std::vector<size_t> lens_bytes;
    DeviceAddress in_buffer = address_of(step.buffer);
    for (size_t index = step.first; index < step.end; index++) {
        const DevicePiece& piece = pieces_[index];
        DeviceAddress host = step.buffer ? in_buffer : address_of(piece.host);
        in_buffer += piece.len_bytes;
        destinations.push_back(direction_ == Direction::to_device ? piece.device : host);
        sources.push_back(direction_ == Direction::to_device ? host : piece.device);
        lens_bytes.push_back(piece.len_bytes);
    }
    size_t count = destinations.size();
    if (driver().copy_batch && count > 1) {
        BatchAttributes attributes;
        size_t start = 0, failed = SIZE_MAX;
        Result error =
            driver().copy_batch(destinations.data(), sources.data(), lens_bytes.data(), count, &attributes, &start, 1, &failed, stream_);
        if (error == success)
            return true;
        // A driver that has the function for devices that have not.
        if (error != error_not_supported)
            return fail(device_->failure(error,
                                         text("copying a batch of ", count, " pieces, ", failed < count ? hex(sources[failed]) : ""))),
                   false;
    }
    for (size_t index = 0; index < count; index++) {
        Result error = driver().copy(destinations[index], sources[index], lens_bytes[index], stream_);
        if (error != success)
            return fail(device_->failure(
                       error, text("copying ", lens_bytes[index], " bytes from ", hex(sources[index]), " to ", hex(destinations[index])))),
                   false;
    }
    return true;
}

/// Gives the next pieces to the device.
void Copy::Work::begin(Step& step) {
    step.first = step.end = next_;
    for (size_t bytes = 0; step.end < pieces_.size() && step.end - step.first < most_of_a_batch; step.end++) {
        bytes += pieces_[step.end].len_bytes;
        if (!is_direct_ && bytes > bounce_bytes)
            break;
    }
    next_ = step.end;
    if (step.buffer && direction_ == Direction::to_device && !fill(step))
        return;
    // Whether or not all of it could be given, the device has to be done with what it got.
    (void)submit(step);
    Result error = driver().event_record(step.event, stream_);
    if (error == success) {
        step.is_under_way = true;
        return;
    }
    fail(device_->failure(error, "recording an event"));
    // Without an event the end can only be waited for. An error of this call means that the device does nothing any more.
    (void)driver().stream_synchronize(stream_);
}

/// Whether the device has finished with a step; then its bytes are where they belong.
bool Copy::Work::has_finished(Step& step) {
    Result error = driver().event_query(step.event);
    if (error == error_not_ready)
        return false;
    step.is_under_way = false;
    if (error != success)
        fail(device_->failure(error, text("copying ", pieces_.size(), " pieces")));
    else if (step.buffer && direction_ == Direction::to_host && result_.ok() && !is_cancelled_)
        (void)empty(step);
    return true;
}

void Copy::Work::advance() {
    bool is_any_under_way = false;
    for (Step& step : steps_) {
        if (step.is_under_way && !has_finished(step))
            is_any_under_way = true;
    }
    for (Step& step : steps_) {
        if (!step.is_under_way && next_ < pieces_.size() && result_.ok() && !is_cancelled_)
            begin(step);
        is_any_under_way |= step.is_under_way;
    }
    bool is_done = next_ == pieces_.size() || !result_.ok() || is_cancelled_;
    if (is_any_under_way || !is_done)
        return;
    if (is_cancelled_ && (!is_direct_ || next_ != pieces_.size()))
        fail({NIXL_ERR_CANCELED, "CXL: the copy was cancelled"});
    // Also after a failure: what the device did write must not linger in the cache.
    if (is_direct_ && direction_ == Direction::to_host)
        flush_all();
    has_ended_ = true;
    hold_.reset();
}

nixl_status_t Copy::Work::poll() {
    std::lock_guard lock(mutex_);
    if (!has_ended_) {
        Current current(device_->driver(), device_->context());
        if (current.result() == success)
            advance();
        else
            return NIXL_IN_PROG; // what the device does cannot be seen: as long as that is so, the memory stays held
    }
    return has_ended_ ? result_.code() : NIXL_IN_PROG;
}

void Copy::Work::cancel() {
    std::lock_guard lock(mutex_);
    is_cancelled_ = true;
}

bool Copy::Work::has_ended() const {
    std::lock_guard lock(mutex_);
    return has_ended_;
}

Status Copy::Work::result() const {
    std::lock_guard lock(mutex_);
    return result_;
}

Status Copy::start(std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool, Direction direction, std::vector<DevicePiece> pieces,
                   Way way, std::shared_ptr<void> hold, std::unique_ptr<Copy>& copy) {
    auto work = std::make_shared<Work>(std::move(device), std::move(pool), direction, std::move(pieces));
    if (Status prepared = work->prepare(way); !prepared.ok())
        return prepared;
    work->start(std::move(hold));
    copy.reset(new Copy(std::move(work)));
    return {};
}

Copy::~Copy() {
    if (cancel(patience_ms))
        return;
    log(LogLevel::error, text("CXL: a GPU did not end a copy within ", patience_ms, " ms: its memory is never used again"));
    static auto& mutex = *new std::mutex;
    static auto& given_up = *new std::vector<std::shared_ptr<Work>>;
    std::lock_guard lock(mutex);
    given_up.push_back(std::move(work_));
}

nixl_status_t Copy::poll() {
    return work_->poll();
}

bool Copy::cancel(uint64_t timeout_ms) {
    if (work_->has_ended())
        return true;
    work_->cancel();
    auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (work_->poll() == NIXL_IN_PROG) {
        if (std::chrono::steady_clock::now() >= deadline)
            return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
}

Status Copy::result() const {
    return work_->result();
}

} // namespace kvbm_cxl::cuda
