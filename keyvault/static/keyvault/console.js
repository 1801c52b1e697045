// The console's scripts. Every page works without them.
import './combobox.js';
import './copy.js';
import './forms.js';
import './live.js';
import './menus.js';
import './secret.js';
import './times.js';
