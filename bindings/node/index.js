"use strict";

const bridge = require("./lib/bridge");
const { connect } = require("./lib/client");
const errors = require("./lib/errors");
const { log } = require("./lib/log");
const { releaseOnSignals } = require("./lib/signals");

module.exports = { ...errors, bridge, connect, log, releaseOnSignals };
