// Our endpoints, for tools/server/server.cpp alone.
#pragma once

#include "moe-hot.h"
#include "server-common.h"
#include "server-http.h"

// Registers them. `wrap`: what the server puts around its handlers. In router mode a child answers: `proxy_get`, `proxy_post`.
inline void moe_hot_add_routes(server_http_context & http, const std::function<server_http_context::handler_t(server_http_context::handler_t)> & wrap,
                               const server_http_context::handler_t & proxy_get, const server_http_context::handler_t & proxy_post) {
    static const char * const NOT_IN_USE = "moe-hot is not in use; expected --moe-hot-cache or --moe-layer-perf-out at the start";
    const auto fail = [](server_http_res & res, const std::string & message, error_type type) {
        const json error = format_error_response(message, type);
        res.status = error.at("code").get<int>();
        res.data   = safe_json_to_str({ { "error", error } });
    };
    const auto ask = [fail](const char * what) -> server_http_context::handler_t {
        return [fail, what](const server_http_req & req) -> server_http_res_ptr {
            auto res = std::make_unique<server_http_res>();
            std::string text;
            if (!moe_hot_ask(what, req.body, text)) {
                fail(*res, NOT_IN_USE, ERROR_TYPE_NOT_SUPPORTED);
                return res;
            }
            if (text.compare(0, 9, "{\"error\":") == 0) {
                const json error = json::parse(text).at("error");
                const std::string kind = error.at("kind").get<std::string>();
                fail(*res, error.at("message").get<std::string>(),
                     kind == "input"         ? ERROR_TYPE_INVALID_REQUEST
                     : kind == "unavailable" ? ERROR_TYPE_UNAVAILABLE
                     : kind == "unsupported" ? ERROR_TYPE_NOT_SUPPORTED
                                             : ERROR_TYPE_SERVER);
                return res;
            }
            if (text.empty()) {
                fail(*res, "internal error in the moe-hot plugin", ERROR_TYPE_SERVER);
                return res;
            }
            res->data = std::move(text);
            return res;
        };
    };
    const bool in_router = bool(proxy_get);
    const server_http_context::handler_t page = [fail, in_router](const server_http_req &) -> server_http_res_ptr {
        auto res = std::make_unique<server_http_res>();
        res->data = moe_hot_page(in_router);
        if (res->data.empty()) {
            fail(*res, NOT_IN_USE, ERROR_TYPE_NOT_SUPPORTED);
        } else {
            res->content_type = "text/html; charset=utf-8";
        }
        return res;
    };
    http.get ("/moe-layer-perf", wrap(proxy_get  ? proxy_get  : ask("snapshot")));
    http.post("/moe-layer-perf", wrap(proxy_post ? proxy_post : ask("mode")));
    http.post("/moe-hot-cache",  wrap(proxy_post ? proxy_post : ask("profile")));
    // A router shows it itself: it needs no key, and must not have a child loaded.
    http.get ("/moe", wrap(page));
}
